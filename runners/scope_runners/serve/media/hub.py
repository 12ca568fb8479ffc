"""Whatever becomes of viewers and recordings, a frame is handed to them without waiting for any."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

from scope_contracts.errors import ScopeError, UserInputError
from scope_contracts.retraction import Retraction
from scope_runners.serve.measurements import quantiles
from scope_runners.serve.media.encoder import Codec
from scope_runners.serve.media.fragments import Fragmenter
from scope_runners.serve.media.frame import PlayedFrame
from scope_runners.serve.media.recording import Recording, recordings_in
from scope_runners.serve.media.rendition import Rendition
from scope_runners.serve.media.viewer import Viewer

MOST_RECORDINGS = 4
"""At once, of one session."""
MOST_ENDED = 16
"""Recordings that may be retracted after their end."""


class TooManyViewersError(ScopeError):
    """The session has as many viewers as it may."""


class MediaHub:
    """What one session shows, to whoever watches. Any thread may use it."""

    def __init__(
        self,
        *,
        fps: Fraction,
        width: int,
        height: int,
        folder: Path,
        max_viewers: int,
        tell: Callable[..., int],
    ) -> None:
        """`tell` publishes an event of the session; recordings go to `folder`."""
        self.fps, self.width, self.height = fps, width, height
        self._folder, self._max_viewers, self._tell = folder, max_viewers, tell
        self._lock = threading.RLock()
        self._renditions = {
            codec: Rendition(codec, width=width, height=height, fps=fps, clock=time.monotonic)
            for codec in Codec
        }
        self._fragmenter = Fragmenter(self._renditions[Codec.H264])
        self._viewers: list[Viewer] = []
        self._dropped_before = 0
        self._recordings: dict[str, Recording] = {}
        self._ended_recordings: deque[Recording] = deque(maxlen=MOST_ENDED)
        self._newest: PlayedFrame | None = None

    @property
    def num_viewers(self) -> int:
        """Viewers that have joined and not left."""
        return len(self._viewers)

    @property
    def newest(self) -> PlayedFrame | None:
        """The frame that is shown."""
        return self._newest

    def show(self, frame: PlayedFrame) -> None:
        """Hand a frame to all; never blocks."""
        self._newest = frame
        for rendition in self._renditions.values():
            rendition.show(frame)
        with self._lock:
            recordings = list(self._recordings.values())
        for recording in recordings:
            recording.show(frame)

    def join(
        self, codec: Codec, loop: asyncio.AbstractEventLoop, *, is_publication: bool = False
    ) -> Viewer:
        """A viewer of encoded frames; a publication may join beyond the bound of viewers.

        Raises:
            TooManyViewersError: there are as many as may be.
        """
        rendition = self._renditions[codec]
        most = None if is_publication else self._max_viewers
        viewer = self._viewer(
            loop, rendition.ask_for_key, lambda v: rendition.leave(v.put), most=most
        )
        rendition.join(viewer.put)
        return viewer

    def join_fragments(self, loop: asyncio.AbstractEventLoop) -> Viewer:
        """A viewer of fragmented MP4: its first packet has the initialisation too. Raises as
        `join`."""
        fragmenter, rendition = self._fragmenter, self._renditions[Codec.H264]
        viewer = self._viewer(
            loop,
            rendition.ask_for_key,
            lambda v: fragmenter.leave(v.put),
            most=self._max_viewers,
        )
        fragmenter.join(viewer.put)
        return viewer

    def ask_for_key(self, codec: Codec) -> None:
        """A viewer has lost a packet."""
        self._renditions[codec].ask_for_key()

    def _viewer(
        self,
        loop: asyncio.AbstractEventLoop,
        ask_for_key: Callable[[], None],
        leave: Callable[[Viewer], None],
        *,
        most: int | None,
    ) -> Viewer:
        def left(viewer: Viewer) -> None:
            leave(viewer)
            with self._lock:
                if viewer in self._viewers:
                    self._viewers.remove(viewer)
                    self._dropped_before += viewer.num_dropped

        with self._lock:
            if most is not None and len(self._viewers) >= most:
                raise TooManyViewersError(
                    f"{most} viewers watch already; start the server with a larger "
                    "--max-viewers, or publish to a media server"
                )
            viewer = Viewer(loop, ask_for_key=ask_for_key, leave=left)
            self._viewers.append(viewer)
        return viewer

    @property
    def recording(self) -> str | None:
        """The name of the newest recording that is under way."""
        return next(reversed(self._recordings), None)

    def recordings(self) -> list[dict[str, Any]]:
        """All of this session, the newest last."""
        with self._lock:
            under_way = set(self._recordings)
        return recordings_in(self._folder, under_way=under_way)  # frames do not wait for a disk

    def start_recording(self, name: str) -> str:
        """Record what is shown from now on; returns its name.

        Raises:
            UserInputError: a recording of that name is there, too many are under way, or the disk
                cannot be written.
        """
        with self._lock:
            if len(self._recordings) >= MOST_RECORDINGS:
                raise UserInputError(f"{MOST_RECORDINGS} recordings run; stop one first")
            recording = Recording(
                self._folder,
                name or time.strftime("recording-%Y%m%d-%H%M%S", time.gmtime()),
                fps=self.fps,
                width=self.width,
                height=self.height,
                on_end=self._recording_ended,
            )
            self._recordings[recording.name] = recording
        self._tell("recording", name=recording.name, state="recording", num_frames=0)
        return recording.name

    def stop_recording(self, name: str) -> None:
        """End a recording, the newest where no name is given; what was shown is in it soon.

        Raises:
            UserInputError: none of that name runs.
        """
        with self._lock:
            recording = self._recordings.get(name or self.recording or "")
        if recording is None:
            what = f"no recording {name!r} runs" if name else "no recording runs"
            raise UserInputError(f"{what}; start one first")
        recording.stop()

    def _recording_ended(self, recording: Recording, why: str) -> None:
        with self._lock:
            self._recordings.pop(recording.name, None)
            self._ended_recordings.append(recording)
        state = "failed" if why else "finished"
        self._tell(
            "recording",
            name=recording.name,
            state=state,
            num_frames=recording.num_frames,
            detail=why,
        )

    def retracted(self, retraction: Retraction) -> None:
        """Chunks that were shown may be wrong: recordings that have them say so."""
        with self._lock:
            for recording in (*self._recordings.values(), *self._ended_recordings):
                recording.retracted(retraction)

    def stats(self) -> dict[str, Any]:
        """As JSON has it."""
        with self._lock:
            dropped = self._dropped_before + sum(each.num_dropped for each in self._viewers)
            encode_ms = [ms for each in self._renditions.values() for ms in each.encode_ms]
            return {
                "viewers": len(self._viewers),
                "encode_ms": quantiles(encode_ms),
                "drops": {
                    "slow_viewer": dropped,
                    "encoder": sum(each.num_dropped for each in self._renditions.values()),
                },
            }

    def close(self) -> None:
        """End viewers, and recordings in order."""
        with self._lock:
            viewers, recordings = list(self._viewers), list(self._recordings.values())
        for recording in recordings:
            recording.stop()
            recording.wait()
        for viewer in viewers:
            viewer.end()
        for rendition in self._renditions.values():
            rendition.close()
