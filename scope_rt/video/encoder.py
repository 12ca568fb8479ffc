"""A frame's packet is with the operating system before the next frame goes in.

That is the price in size (about a tenth more bytes of H.264 at equal quality) of a video that
outlives its writer.
"""

import zlib
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from av.video.reformatter import Interpolation
from av.video.stream import VideoStream
from numpy.typing import NDArray

# H.264 without look-ahead needs crf 20 for the quality that 18 gives with it.
_CODEC_OPTIONS = {
    "libx264": {"crf": "20", "preset": "veryfast", "tune": "zerolatency"},
    "libvpx": {"crf": "18", "deadline": "realtime", "cpu-used": "4", "lag-in-frames": "0"},
}
# VP8 treats the bit rate as a ceiling over crf; without one it falls back to a blurry default.
_VP8_MAX_BITS_PER_PIXEL = 2


class SegmentEncoder:
    """One segment with one video stream; used from one thread at a time."""

    def __init__(self, path: Path, *, codec: str, width: int, height: int, fps: Fraction) -> None:
        """Create `path` and write its header. Raises `av.FFmpegError`."""
        self._container = av.open(str(path), "w", format="nut", options={"flush_packets": "1"})
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
        self._container.start_encoding()
        self._stream = stream
        self._next_pts = 0
        self.extradata = stream.codec_context.extradata or b""
        """The header that a player reads once for all frames."""
        self.crc32 = 0
        """CRC-32 over the packets since somebody last set it to 0."""

    def encode(self, frame_HWC: NDArray[np.uint8]) -> None:
        """Append one frame; its packet has gone to the operating system on return."""
        # FFmpeg repeats the pixels: it lets go of the interpreter meanwhile, numpy does not.
        frame = av.VideoFrame.from_ndarray(frame_HWC, format="rgb24").reformat(
            width=self._stream.width,
            height=self._stream.height,
            format="yuv420p",
            interpolation=Interpolation.POINT,
        )
        frame.pts = self._next_pts
        self._next_pts += 1
        (packet,) = self._stream.encode(frame)
        self.crc32 = zlib.crc32(memoryview(packet), self.crc32)
        self._container.mux(packet)

    def close(self) -> None:
        """Close the file. Raises `av.FFmpegError`."""
        self._container.close()
