"""Of pictures that come at any rate, the newest are there at the stream's own; none waits."""

import threading
from collections import deque

import av
import numpy as np
from av.video.reformatter import Interpolation
from numpy.typing import NDArray

_EARLY = 0.5
"""A picture is taken that comes so much of a frame early: sources are not exact."""


class NewestFrames:
    """Written by one thread, read by another."""

    def __init__(self, *, fps: float, width: int, height: int, most: int) -> None:
        """Keeps `most` pictures, sizes in pixels."""
        self._frame_s, self._width, self._height = 1 / fps, width, height
        self._kept: deque[NDArray[np.uint8]] = deque(maxlen=most)
        self._lock = threading.Lock()
        self._next_s: float | None = None
        self.num_seen = 0
        """Pictures that came."""

    def add(self, picture: av.VideoFrame, time_s: float) -> None:
        """A picture that is of `time_s` in its source; kept where one is due."""
        self.num_seen += 1
        if self._next_s is not None and time_s < self._next_s - _EARLY * self._frame_s:
            if time_s > self._next_s - 1.0:
                return
            self._next_s = None  # the source began anew
        frame = self._fitted(picture)
        with self._lock:
            self._kept.append(frame)
        due_s = time_s if self._next_s is None else self._next_s
        self._next_s = max(due_s + self._frame_s, time_s)

    def newest(self, num_frames: int) -> NDArray[np.uint8] | None:
        """The newest `[T, H, W, 3]`, fewer where fewer came; None before the first."""
        with self._lock:
            kept = list(self._kept)[-num_frames:]
        return np.stack(kept) if kept else None

    def _fitted(self, picture: av.VideoFrame) -> NDArray[np.uint8]:
        """Scaled so that it covers the stream's size, and cut to it around its middle."""
        scale = max(self._width / picture.width, self._height / picture.height)
        width = max(self._width, round(picture.width * scale))
        height = max(self._height, round(picture.height * scale))
        scaled = picture.reformat(
            width=width, height=height, format="rgb24", interpolation=Interpolation.AREA
        ).to_ndarray()
        left, top = (width - self._width) // 2, (height - self._height) // 2
        cut = scaled[top : top + self._height, left : left + self._width]
        return np.ascontiguousarray(cut)
