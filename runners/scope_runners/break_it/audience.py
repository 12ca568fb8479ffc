"""What may stand behind rank0 in a real program: a video file, and viewers good and bad.

A viewer tells of every chunk it is handed; whether it should have been is decided elsewhere.
"""

import threading
from typing import Protocol

import av

from scope_rt.control.chunk import Chunk
from scope_rt.models.recipe import Recipe
from scope_rt.video.viewers import Viewer, ViewerHub
from scope_rt.video.writer import VideoWriter
from scope_runners.break_it.events import EventKind, EventLog
from scope_runners.break_it.script import Audience, RankJob

UNREAD_CHUNKS = 4
"""What a viewer's queue holds at most."""
PATIENCE_S = 30.0


class Listener(Protocol):
    """Hears every chunk that rank0 is handed."""

    def hear(self, chunk: Chunk) -> None: ...

    def close(self) -> None: ...


def gather(job: RankJob, recipe: Recipe, log: EventLog) -> Listener:
    """The audience of `job`."""
    match job.audience:
        case Audience.PIPE:
            return _Pipe(job, recipe, log)
        case Audience.IDLE:
            return _IdleViewer(log, num_chunks=job.script.num_chunks)
        case _:
            return _Nobody()


class _Nobody:
    def hear(self, chunk: Chunk) -> None: ...

    def close(self) -> None: ...


class _Pipe:
    """A video writer, and a viewer who reads nothing before the stream has ended."""

    def __init__(self, job: RankJob, recipe: Recipe, log: EventLog) -> None:
        self._log, self._path = log, job.video
        self._writer = VideoWriter(
            job.video, width=recipe.default_width, height=recipe.default_height, fps=recipe.fps
        )
        self._hub: ViewerHub[Chunk] = ViewerHub()
        self._late = self._hub.join(max_chunks=2 * job.script.num_chunks)
        self._last: Chunk | None = None

    def hear(self, chunk: Chunk) -> None:
        last, self._last = self._last, chunk
        if last is not None and chunk.cache_epoch > last.cache_epoch:
            self._hub.cut(chunk.cache_epoch)
            is_shown = self._hub.emit(last)
            self._log.tell(EventKind.NOTED, text=f"late chunk shown: {is_shown}")
        self._hub.emit(chunk)
        self._writer.write(chunk.frames)

    def close(self) -> None:
        self._hub.close()
        while (chunk := self._late.next(PATIENCE_S)) is not None:
            self._log.tell(EventKind.SHOWN, chunk=chunk.chunk_index, epoch=chunk.cache_epoch)
        self._writer.close()
        with av.open(str(self._path)) as video:
            num_frames = sum(1 for _ in video.decode(video=0))
        self._log.tell(
            EventKind.NOTED, text=f"video frames: {num_frames} of {self._writer.num_frames}"
        )


class _IdleViewer:
    """One viewer reads everything on a thread of its own, the other nothing at all."""

    def __init__(self, log: EventLog, *, num_chunks: int) -> None:
        self._log = log
        self._hub: ViewerHub[Chunk] = ViewerHub()
        self._idle = self._hub.join(max_chunks=UNREAD_CHUNKS)
        reader = self._hub.join(max_chunks=num_chunks)
        self._thread = threading.Thread(target=self._read, args=(reader,), daemon=True)
        self._thread.start()

    def hear(self, chunk: Chunk) -> None:
        self._hub.emit(chunk)

    def close(self) -> None:
        self._hub.close()
        self._thread.join(PATIENCE_S)
        self._log.tell(EventKind.NOTED, text=f"idle viewer lost: {self._idle.dropped_chunks}")

    def _read(self, viewer: Viewer[Chunk]) -> None:
        while (chunk := viewer.next(PATIENCE_S)) is not None:
            self._log.tell(EventKind.SHOWN, chunk=chunk.chunk_index, epoch=chunk.cache_epoch)
