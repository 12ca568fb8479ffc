"""A frame goes in, its packet comes out, before the next frame: nothing is kept back for later."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from io import BytesIO
from typing import Any

import av
import numpy as np
from av.video.codeccontext import VideoCodecContext
from av.video.frame import PictureType
from av.video.reformatter import Interpolation
from numpy.typing import NDArray
from PIL import Image

from scope_runners.serve.media.frame import PlayedFrame

CLOCK = Fraction(1, 90_000)
_LEAST_SIDE = 256
"""Smaller pictures are repeated pixel for pixel: colours are halved in each direction later."""
_BITS_PER_PIXEL = 0.25
_JPEG_QUALITY = 85
_KEYFRAME_EVERY_S = 4


class Codec(StrEnum):
    """What a rendition is encoded with."""

    H264 = "h264"
    VP8 = "vp8"
    JPEG = "jpeg"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Encoded:
    """One frame as viewers get it."""

    data: bytes
    is_key: bool
    time_90k: int
    chunk_index: int
    packet: Any = None
    """The same as an `av.Packet`; None of a JPEG."""


def encoded_size(width: int, height: int) -> tuple[int, int]:
    """Width and height of what is encoded: each pixel a whole number of times, and even."""
    scale = _scale_of(width, height)
    return width * scale + width * scale % 2, height * scale + height * scale % 2


def _scale_of(width: int, height: int) -> int:
    return max(1, _LEAST_SIDE // min(width, height))


class VideoEncoder:
    """H.264 or VP8; used from one thread at a time."""

    def __init__(self, codec: Codec, *, width: int, height: int, fps: Fraction) -> None:
        """Raises `av.FFmpegError` or `ValueError` where no encoder of this codec can be opened."""
        self.width, self.height = encoded_size(width, height)
        self.codec = codec
        self._context = _opened(codec, width=self.width, height=self.height, fps=fps)

    @property
    def name(self) -> str:
        """Of the encoder in use."""
        return str(self._context.name)

    def encode(self, frame: PlayedFrame, *, as_key: bool) -> Encoded | None:
        """The packet of a frame; None where the encoder kept it back."""
        picture = av.VideoFrame.from_ndarray(frame.frame_HWC, format="rgb24").reformat(
            width=self.width,
            height=self.height,
            format="yuv420p",
            interpolation=Interpolation.POINT,
        )
        picture.pts, picture.time_base = frame.time_90k, CLOCK
        picture.pict_type = PictureType.I if as_key else PictureType.NONE
        packets = self._context.encode(picture)
        if not packets:
            return None
        packet = packets[-1]
        packet.time_base = CLOCK
        return Encoded(
            data=bytes(packet),
            is_key=packet.is_keyframe,
            time_90k=frame.time_90k,
            chunk_index=frame.chunk_index,
            packet=packet,
        )


def _opened(codec: Codec, *, width: int, height: int, fps: Fraction) -> VideoCodecContext:
    """The first encoder that this machine can open: a GPU's before the CPU's."""
    names = {Codec.H264: ("h264_nvenc", "libx264"), Codec.VP8: ("libvpx",)}[codec]
    for name in names:
        try:
            context = av.CodecContext.create(name, "w")
            assert isinstance(context, VideoCodecContext)
            context.width, context.height, context.pix_fmt = width, height, "yuv420p"
            context.time_base, context.framerate = CLOCK, fps
            context.thread_count = 1  # the other cores belong to generation
            context.bit_rate = int(width * height * fps * _BITS_PER_PIXEL)
            context.gop_size = int(fps * _KEYFRAME_EVERY_S)
            context.options = dict(_OPTIONS[name])
            context.open()
            return context
        except (av.FFmpegError, ValueError) as error:
            if name == names[-1]:
                raise
            del error
    raise AssertionError("the last one is opened, or raises")


_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "libx264": {
        "preset": "ultrafast",
        "tune": "zerolatency",
        "profile": "baseline",
        "forced-idr": "1",
        "crf": "20",
    },
    "h264_nvenc": {
        "preset": "p1",
        "tune": "ull",
        "zerolatency": "1",
        "delay": "0",  # by default it keeps frames back until its surfaces are full
        "forced-idr": "1",
        "bf": "0",
    },
    "libvpx": {
        "deadline": "realtime",
        "cpu-used": "8",
        "lag-in-frames": "0",
        "error-resilient": "default",
        "crf": "12",
    },
}


def jpeg_of(frame: PlayedFrame) -> Encoded:
    """A frame as JPEG."""
    pixels: NDArray[np.uint8] = frame.frame_HWC
    scale = _scale_of(pixels.shape[1], pixels.shape[0])
    picture, file = Image.fromarray(pixels), BytesIO()
    size = (pixels.shape[1] * scale, pixels.shape[0] * scale)
    picture.resize(size, Image.Resampling.NEAREST).save(file, "JPEG", quality=_JPEG_QUALITY)
    return Encoded(
        data=file.getvalue(), is_key=True, time_90k=frame.time_90k, chunk_index=frame.chunk_index
    )
