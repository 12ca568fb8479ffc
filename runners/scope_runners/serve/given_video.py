"""The one source of pictures that a stream has, and how much noise they are mixed with."""

import threading
import zlib

from scope_rt.control.motion_noise import MotionNoise
from scope_runners.serve.media.video_in import Source
from scope_runners.serve.messages import Pictures, RankReady

NOTHING = Pictures(num_frames=0, height=0, width=0, noise_scale=0.5, crc32=0)


class GivenVideo:
    """Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._source: Source | None = None
        self._noise = MotionNoise(low=0.1, high=0.1)
        self._is_told = True
        """Whether rank0 knows that there is none."""

    @property
    def told(self) -> dict[str, object] | None:
        """As JSON has it; None where there is no source."""
        with self._lock:
            if self._source is None:
                return None
            scale = self._noise.scale
            return {
                "source": self._source.name,
                "noise_low": self._noise.low,
                "noise_high": self._noise.high,
                "noise_scale": scale,
            }

    def begin(self, source: Source, noise: MotionNoise) -> None:
        """Take pictures from there, in place of a source before."""
        with self._lock:
            before, self._source, self._noise = self._source, source, noise
            self._is_told = False
        if before is not None:
            before.close()

    def end(self, source: Source | None = None) -> None:
        """Take no more; a `source` that another has replaced is none."""
        with self._lock:
            if source is not None and source is not self._source:
                return
            before, self._source = self._source, None
        if before is not None:
            before.close()

    def next(self, ready: RankReady) -> tuple[Pictures, bytes] | None:
        """What rank0 is told before the next chunk; None where it knows it."""
        with self._lock:
            if self._source is None:
                is_told, self._is_told = self._is_told, True
                return None if is_told else (NOTHING, b"")
            frames = self._source.newest(ready.chunk_frames)
            if frames is None:
                return None
            self._noise = self._noise.after(frames)
            noise_scale = self._noise.scale
        assert noise_scale is not None, "pictures have come"
        body = frames.tobytes()
        pictures = Pictures(
            num_frames=len(frames),
            height=ready.height,
            width=ready.width,
            noise_scale=noise_scale,
            crc32=zlib.crc32(body),
        )
        return pictures, body
