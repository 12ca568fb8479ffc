"""A stream in few labelled pictures, whatever its length: every change and an even spread."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray

from scope_contracts.errors import RecordingError
from scope_rt.video.contact_sheet import write_contact_sheet
from scope_runners.chunk_record import ChunkRecord
from scope_runners.job import Timeline

_MOST_SPREAD = 32
"""Chunks that are shown beside changes; of more, every second, third, ..."""
_MOST_CHANGES = 24
_LONGEST_DECODE = 250
"""Frames: further apart than two key frames, seeking is cheaper than decoding what lies between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A frame of the video, counted from 0, and what is written below it."""

    frame_number: int
    label: str


def scenes(chunks: Sequence[ChunkRecord], timeline: Timeline, *, fps: int) -> list[Scene]:
    """The middle frames of the chunks that tell the story."""
    last = timeline.num_chunks - 1
    step = math.ceil(timeline.num_chunks / _MOST_SPREAD)
    shown = {*range(0, timeline.num_chunks, step), last}
    shown.update(event.chunk_index for event in timeline.events[:_MOST_CHANGES])
    found: list[Scene] = []
    start, num_prompts, before = 0, 0, None
    for chunk in chunks:
        middle = start + chunk.frames // 2
        words = [f"{middle / fps:.1f}s", f"e{chunk.cache_epoch}"]
        if before is not None and chunk.cache_epoch != before.cache_epoch:
            words.append("cut")
        if before is None and timeline.has_start_frame:
            words.append("image")
        if before is None or chunk.prompt != before.prompt:
            num_prompts += 1
            words.append(f"prompt {num_prompts}")
        if chunk.chunk_index in shown:
            found.append(Scene(frame_number=middle, label=" ".join(words)))
        start, before = start + chunk.frames, chunk
    return found


def write_storyboard(path: Path, video: Path, shown: Sequence[Scene], *, scale: int) -> None:
    """Draw `shown`, as the finished `video` shows it, into the contact sheet `path`.

    `scale` is how many times the video repeats every pixel each way.

    Raises:
        RecordingError: the video cannot be read.
        OSError: the sheet cannot be written.
    """
    try:
        numbers = [scene.frame_number for scene in shown]
        pictures = [picture[::scale, ::scale] for picture in _frames(video, numbers)]
    except (av.FFmpegError, ValueError) as error:
        raise RecordingError(f"{video} was written and cannot be read again ({error})") from error
    write_contact_sheet(pictures, [scene.label for scene in shown], path)


def _frames(video: Path, numbers: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
    """The frames of rising `numbers`, uint8 HWC."""
    with av.open(str(video)) as container:
        stream = container.streams.video[0]
        assert stream.average_rate is not None
        assert stream.time_base is not None
        rate = Fraction(stream.average_rate)
        decoded, at = container.decode(stream), -1
        frame: av.VideoFrame | None = None
        for number in numbers:
            if number - at > _LONGEST_DECODE:
                container.seek(int(number / rate / stream.time_base), stream=stream)
                decoded = container.decode(stream)
            while at < number:
                if (frame := next(decoded, None)) is None or frame.time is None:
                    raise ValueError(f"it ends after frame {at}, before frame {number}")
                at = round(frame.time * rate)
            assert frame is not None
            yield frame.to_ndarray(format="rgb24").astype(np.uint8, copy=False)
