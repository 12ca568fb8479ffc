"""Encoding runs beside generation, and a video under its final name is always complete.

The caller waits only when the queue is full, and `blocked_s` says how long.
"""

import math
import time
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Self

import av
import numpy as np
from av.video.reformatter import Interpolation
from av.video.stream import VideoStream
from numpy.typing import NDArray

from scope_contracts.errors import ScopeError, UserInputError
from scope_rt.streaming import output_file
from scope_rt.streaming.trace import NullTrace, Trace

_CODEC_OF_SUFFIX = {".mp4": "libx264", ".webm": "libvpx"}
_CODEC_OPTIONS = {
    "libx264": {"crf": "18", "preset": "veryfast"},
    "libvpx": {"crf": "18", "deadline": "realtime", "cpu-used": "4"},
}
# VP8 treats the bit rate as a ceiling over crf; without one it falls back to a blurry default.
_VP8_MAX_BITS_PER_PIXEL = 2
_SMALLEST_VIEWABLE_SIDE = 256


class RecordingError(ScopeError):
    """The video could not be written. Free disk space or change the output, then start again."""


class VideoWriter:
    """Encodes chunks of frames to H.264 (`.mp4`) or VP8 (`.webm`) on a thread of its own.

    As a context manager it closes on success and aborts on an exception.
    """

    def __init__(
        self,
        path: Path,
        *,
        width: int,
        height: int,
        fps: Fraction | int,
        scale: int | None = None,
        max_queued_chunks: int = 8,
        trace: Trace | None = None,
    ) -> None:
        """Prepare `path` for frames of `width` x `height` pixels at `fps` frames per second.

        `scale` repeats every pixel that many times each way; by default enough for the short side
        to reach 256 pixels, so that a person can see a small model's output.
        Raises `UserInputError` for a path, size or rate that cannot be recorded.
        """
        scale = _viewable_scale(width, height) if scale is None else scale
        _check_format(width, height, fps, scale)
        self.path = path
        self.scale = scale
        self.blocked_s = 0.0
        """Seconds that `write` waited for the encoder because the queue was full."""
        self.encode_ms: list[float] = []
        """Milliseconds of encoding per chunk, in order."""
        self.num_frames = 0
        """Frames accepted so far."""
        self._frame_shape = (height, width, 3)
        self._trace: Trace = trace or NullTrace()
        self._max_queued_chunks = max_queued_chunks
        self._queued: deque[Future[None]] = deque()
        self._partial = output_file.claim(path, suffixes=_CODEC_OF_SUFFIX)
        # Also runs when the interpreter exits without close or abort.
        self._remove_partial = weakref.finalize(self, self._partial.unlink, missing_ok=True)
        self._encoder = _Encoder(
            self._partial, width=width * scale, height=height * scale, fps=Fraction(fps)
        )
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="video-writer")
        self._open = True

    def write(self, frames_THWC: NDArray[np.uint8]) -> None:
        """Queue uint8 RGB frames; the array may be reused at once.

        Raises `RecordingError` if an earlier chunk failed; nothing then stays on disk.
        """
        if frames_THWC.shape[1:] != self._frame_shape or frames_THWC.dtype != np.uint8:
            raise ValueError(
                f"frames_THWC: got {frames_THWC.dtype} {frames_THWC.shape}, "
                f"want uint8 (T, {', '.join(map(str, self._frame_shape))})"
            )
        if not self._open:
            raise RecordingError(f"{self.path}: recording has ended; open a new writer")
        while self._queued and self._queued[0].done():
            self._finish_oldest()
        if len(self._queued) >= self._max_queued_chunks:
            start_s = time.perf_counter()
            self._finish_oldest()
            self.blocked_s += time.perf_counter() - start_s
        self._queued.append(self._thread.submit(self._encode, frames_THWC.copy()))
        self.num_frames += len(frames_THWC)

    def close(self) -> None:
        """Finish the file under its name; a video of no frames leaves no file. Idempotent.

        Raises `RecordingError` if a chunk or the end of the file could not be written.
        """
        if not self._open:
            return
        if self.num_frames == 0:
            self.abort()
            return
        self._queued.append(self._thread.submit(self._publish))
        while self._queued:
            self._finish_oldest()
        self._thread.shutdown()
        self._open = False

    def abort(self) -> None:
        """Stop encoding and leave nothing on disk. Idempotent, and harmless after `close`."""
        self._open = False
        self._queued.clear()
        self._thread.shutdown(cancel_futures=True)
        self._remove_partial()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort()

    def _encode(self, frames_THWC: NDArray[np.uint8]) -> None:
        start_s = time.perf_counter()
        with self._trace.span("encode", track="encode"):
            for frame_HWC in frames_THWC:
                self._encoder.encode(frame_HWC)
        self.encode_ms.append((time.perf_counter() - start_s) * 1e3)

    def _publish(self) -> None:
        self._encoder.finish()
        self._partial.replace(self.path)

    def _finish_oldest(self) -> None:
        """Wait for the oldest queued work; on its failure end the recording."""
        try:
            self._queued.popleft().result()
        except (av.FFmpegError, OSError, ValueError) as error:
            self.abort()
            raise RecordingError(
                f"{self.path}: recording stopped and was removed ({error}); "
                "free disk space or choose another output"
            ) from error


class _Encoder:
    """One container with one video stream; used from one thread at a time."""

    def __init__(self, path: Path, *, width: int, height: int, fps: Fraction) -> None:
        codec = _CODEC_OF_SUFFIX[path.suffix]
        # The index in front lets a player start before it has the whole file.
        container_options = {"movflags": "+faststart"} if path.suffix == ".mp4" else {}
        self._container = av.open(str(path), "w", options=container_options)
        stream = self._container.add_stream(codec, rate=fps, options=_CODEC_OPTIONS[codec])
        assert isinstance(stream, VideoStream)
        stream.width = width
        stream.height = height
        stream.pix_fmt = "yuv420p"
        stream.codec_context.time_base = 1 / fps
        # The other cores belong to generation.
        stream.codec_context.thread_count = 1
        if codec == "libvpx":
            stream.bit_rate = int(width * height * fps * _VP8_MAX_BITS_PER_PIXEL)
        self._stream = stream
        self._next_pts = 0

    def encode(self, frame_HWC: NDArray[np.uint8]) -> None:
        # FFmpeg repeats the pixels: it lets go of the interpreter meanwhile, numpy does not.
        frame = av.VideoFrame.from_ndarray(frame_HWC, format="rgb24").reformat(
            width=self._stream.width,
            height=self._stream.height,
            format="yuv420p",
            interpolation=Interpolation.POINT,
        )
        frame.pts = self._next_pts
        self._next_pts += 1
        self._container.mux(self._stream.encode(frame))

    def finish(self) -> None:
        self._container.mux(self._stream.encode(None))
        self._container.close()


def _viewable_scale(width: int, height: int) -> int:
    return max(1, math.ceil(_SMALLEST_VIEWABLE_SIDE / max(1, min(width, height))))


def _check_format(width: int, height: int, fps: Fraction | int, scale: int) -> None:
    for name, value in (("width", width), ("height", height)):
        if value <= 0 or value * scale % 2:
            raise UserInputError(
                f"{name}: got {value} pixels times scale {scale}, want a positive even number; "
                f"change {name} or scale"
            )
    if scale < 1:
        raise UserInputError(f"scale: got {scale}, want 1 or more")
    if fps <= 0:
        raise UserInputError(f"fps: got {fps}, want more than 0")
