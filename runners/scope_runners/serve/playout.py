"""Every frame is shown at its time: one after the other, none twice, and none of an epoch that a
hard cut has ended.

Where chunks come slower than they play, frames are spread over the time that chunks take, so that
the picture is slow and does not stop and go.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from scope_contracts.errors import ScopeError
from scope_runners.serve.media.frame import PlayedFrame

CLOCK_HZ = 90_000
_LOG = logging.getLogger(__name__)
_SLOW = 1.05
"""Where chunks cost more than they show, frames last so much longer than the average."""
_FAR_BEHIND_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A chunk's frames `[T, H, W, 3]`, ready to be shown."""

    frames: NDArray[np.uint8]
    chunk_index: int
    cache_epoch: int


@dataclass(frozen=True, slots=True)
class _Waiting:
    frame_HWC: NDArray[np.uint8]
    chunk_index: int
    cache_epoch: int
    is_first: bool


class Timeline:
    """Which frame is due when. Pure: `now_s` comes in, seconds of one clock."""

    def __init__(self, fps: Fraction) -> None:
        self._waiting: deque[_Waiting] = deque()
        self._frame_s = float(1 / fps)
        self._interval_s = self._frame_s
        self._due_s: float | None = None
        """When the next frame is due; None before the first chunk, and after a pause."""
        self._began_s: float | None = None
        self._last_90k = -1
        self._epoch = -1
        self.num_shown = 0
        self.num_stalls = 0
        """How often a frame was due and not there."""
        self.num_dropped = 0
        """Frames that a hard cut kept from being shown."""
        self.last_chunk = -1
        """Of the frame that was shown last."""

    @property
    def media_left_s(self) -> float:
        """What is there and not shown."""
        return len(self._waiting) * self._interval_s

    @property
    def interval_s(self) -> float:
        """From one frame to the next."""
        return self._interval_s

    def add(self, chunk: Arrived, now_s: float, *, chunk_s: float) -> None:
        """Append a chunk; one of a newer epoch takes the place of all that waits.

        `chunk_s` is what a chunk costs to make: frames are shown no faster than they come.
        """
        if chunk.cache_epoch > self._epoch:
            self.num_dropped += len(self._waiting)
            self._waiting.clear()
            self._epoch = chunk.cache_epoch
        num_frames = len(chunk.frames)
        self._interval_s = max(self._frame_s, _SLOW * chunk_s / max(1, num_frames))
        if self._interval_s < self._frame_s * _SLOW:
            self._interval_s = self._frame_s
        if self._due_s is None:
            self._due_s = now_s
        elif not self._waiting and now_s > self._due_s + self._interval_s:
            self.num_stalls += 1
            self._due_s = now_s
        for index, frame_HWC in enumerate(chunk.frames):
            self._waiting.append(
                _Waiting(frame_HWC, chunk.chunk_index, chunk.cache_epoch, index == 0)
            )

    def forget(self) -> None:
        """Show nothing of what waits: it is made again."""
        self._waiting.clear()
        self._epoch = -1

    def pause(self) -> None:
        """Time stands still until `next` is asked again."""
        self._due_s = None

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until the next frame is due, 0 for now; None where none is there."""
        if not self._waiting:
            return None
        if self._due_s is None:
            self._due_s = now_s
        return max(0.0, self._due_s - now_s)

    def next(self, now_s: float) -> PlayedFrame | None:
        """The frame that is due, and no later time; None where none is."""
        if self.wait_s(now_s) != 0.0:
            return None
        assert self._due_s is not None, "a frame waits"
        if now_s > self._due_s + _FAR_BEHIND_S:
            self._due_s = now_s  # this process was stopped meanwhile
        waiting = self._waiting.popleft()
        if self._began_s is None:
            self._began_s = self._due_s
        time_90k = round((self._due_s - self._began_s) * CLOCK_HZ)
        self._last_90k = max(self._last_90k + 1, time_90k)
        self._due_s += self._interval_s
        self.last_chunk = waiting.chunk_index
        shown = PlayedFrame(
            frame_HWC=waiting.frame_HWC,
            number=self.num_shown,
            time_90k=self._last_90k,
            chunk_index=waiting.chunk_index,
            cache_epoch=waiting.cache_epoch,
            is_first=waiting.is_first,
        )
        self.num_shown += 1
        return shown


class Playout:
    """Shows the frames of a timeline on a thread of its own, and calls `tick` at least as often as
    it asks for."""

    def __init__(
        self,
        timeline: Timeline,
        show: Callable[[PlayedFrame], None],
        tick: Callable[[], float],
        clock: Callable[[], float],
        *,
        on_error: Callable[[ScopeError], None],
    ) -> None:
        """`on_error` is called once, where one of the others raises: nothing is shown any more.

        `show` must not block. `tick` is called after every frame and every change, and says in
        how many seconds to call it again at the latest. Both are called without the lock."""
        self.timeline = timeline
        self.lock = threading.RLock()
        """Of the timeline, and of what must change with it."""
        self._show, self._tick, self._clock = show, tick, clock
        self._on_error = on_error
        self._changed = threading.Condition(self.lock)
        self._is_paused = self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="playout", daemon=True)

    def start(self) -> None:
        """Begin; nothing is shown before a chunk is added."""
        self._thread.start()

    def add(self, chunk: Arrived, *, chunk_s: float) -> None:
        """A chunk has come."""
        with self._changed:
            self.timeline.add(chunk, self._clock(), chunk_s=chunk_s)
            self._changed.notify_all()

    def pause(self, *, is_paused: bool) -> None:
        """Stop at the frame that is shown, or go on."""
        with self._changed:
            self._is_paused = is_paused
            if is_paused:
                self.timeline.pause()
            self._changed.notify_all()

    def wake(self) -> None:
        """Something changed that `tick` looks at."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread; blocks for what `show` takes."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(10.0)

    def _run(self) -> None:
        try:
            self._play()
        except ScopeError as error:
            self._on_error(error)
        except Exception as error:  # noqa: BLE001 - a frozen picture that nobody explains
            _LOG.exception("nothing more is shown")
            self._on_error(ScopeError(f"nothing more can be shown ({error!r}); see the log"))

    def _play(self) -> None:
        while True:
            frame = None
            with self._changed:
                if self._has_ended:
                    return
                if not self._is_paused:
                    frame = self.timeline.next(self._clock())
            if frame is not None:
                self._show(frame)
            tick_s = self._tick()
            with self._changed:
                due_s = None if self._is_paused else self.timeline.wait_s(self._clock())
                wait_s = tick_s if due_s is None else min(tick_s, due_s)
                if wait_s > 0 and not self._has_ended:
                    self._changed.wait(wait_s)
