"""Consumers of rank0's chunks as in a real program: a video writer, viewers that read or do not.

A viewer logs every chunk it receives; `cases.consumers` decides whether it should have.
"""

import threading
from typing import Protocol

import av

from scope_rt.control.chunk import Chunk
from scope_rt.models.recipe import Recipe
from scope_rt.video.viewers import Viewer, ViewerHub
from scope_rt.video.writer import VideoWriter
from scope_runners.break_it.events import EventKind, EventLog
from scope_runners.break_it.job import ConsumerKind, RankJob

UNREAD_CHUNKS = 4
"""Chunks that a viewer's queue holds at most."""
PATIENCE_S = 30.0


class ChunkConsumer(Protocol):
    """Receives every chunk that rank0 emits."""

    def take(self, chunk: Chunk) -> None: ...

    def close(self) -> None: ...


def open_consumer(job: RankJob, recipe: Recipe, log: EventLog) -> ChunkConsumer:
    """The consumer that `job` asks for."""
    match job.consumer_kind:
        case ConsumerKind.PIPE:
            return _VideoAndViewer(job, recipe, log)
        case ConsumerKind.IDLE:
            return _IdleViewer(log, num_chunks=job.script.num_chunks)
        case _:
            return _NoConsumer()


class _NoConsumer:
    def take(self, chunk: Chunk) -> None: ...

    def close(self) -> None: ...


class _VideoAndViewer:
    """A video writer, and a viewer who reads nothing before the stream has ended."""

    def __init__(self, job: RankJob, recipe: Recipe, log: EventLog) -> None:
        self._log, self._path = log, job.video
        self._writer = VideoWriter(
            job.video, width=recipe.default_width, height=recipe.default_height, fps=recipe.fps
        )
        self._hub: ViewerHub[Chunk] = ViewerHub()
        self._late = self._hub.join(max_chunks=2 * job.script.num_chunks)
        self._last: Chunk | None = None

    def take(self, chunk: Chunk) -> None:
        last, self._last = self._last, chunk
        if last is not None and chunk.cache_epoch > last.cache_epoch:
            self._hub.cut(chunk.cache_epoch)
            is_shown = self._hub.emit(last)
            self._log.write(EventKind.NOTED, text=f"late chunk shown: {is_shown}")
        self._hub.emit(chunk)
        self._writer.write(chunk.frames)

    def close(self) -> None:
        self._hub.close()
        while (chunk := self._late.next(PATIENCE_S)) is not None:
            self._log.write(EventKind.SHOWN, chunk=chunk.chunk_index, epoch=chunk.cache_epoch)
        self._writer.close()
        with av.open(str(self._path)) as video:
            num_frames = sum(1 for _ in video.decode(video=0))
        self._log.write(
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

    def take(self, chunk: Chunk) -> None:
        self._hub.emit(chunk)

    def close(self) -> None:
        self._hub.close()
        self._thread.join(PATIENCE_S)
        self._log.write(EventKind.NOTED, text=f"idle viewer lost: {self._idle.dropped_chunks}")

    def _read(self, viewer: Viewer[Chunk]) -> None:
        while (chunk := viewer.next(PATIENCE_S)) is not None:
            self._log.write(EventKind.SHOWN, chunk=chunk.chunk_index, epoch=chunk.cache_epoch)
