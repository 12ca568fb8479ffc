"""Every frame is a flat grey that tells its number, so that a decoded video can be read back.

Not a test itself.
"""

from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from scope_contracts.errors import UserInputError
from scope_lab.sample_log import opened
from scope_rt.record.progress import StreamProgress
from scope_rt.record.reader import read_progress, video_records
from scope_rt.record.stream_log import StreamLog
from scope_rt.video.writer import VideoWriter

SIDE = 64
FPS = 16
SUFFIXES = pytest.mark.parametrize("suffix", [".mp4", ".webm"])
# As a streaming decoder emits them: an epoch's first chunk is shorter than the others.
CHUNK_SIZES = (5, 8, 8, 8, 5, 8, 8, 8)
STARTS = [sum(CHUNK_SIZES[:index]) for index in range(len(CHUNK_SIZES) + 1)]


def greys(chunk_index: int) -> NDArray[np.uint8]:
    """The frames THWC of a chunk."""
    return grey_frames(STARTS[chunk_index], CHUNK_SIZES[chunk_index])


def grey_frames(first: int, num_frames: int) -> NDArray[np.uint8]:
    """Frames THWC by their numbers."""
    numbers = range(first, first + num_frames)
    return np.stack([np.full((SIDE, SIDE, 3), 4 * number + 4, np.uint8) for number in numbers])


def frame_numbers(path: Path) -> list[int]:
    with av.open(str(path)) as container:
        pictures = [
            (frame.to_ndarray(format="rgb24").mean(), frame.time)
            for frame in container.decode(video=0)
        ]
    times_s = [time_s for _, time_s in pictures]
    assert times_s == pytest.approx([index / FPS for index in range(len(times_s))], abs=1e-3)
    return [round((grey - 4) / 4) for grey, _ in pictures]


def log_of(path: Path) -> Path:
    """Elsewhere, so that what is left beside the video can be told by its names alone."""
    return path.parent.with_name(f"{path.parent.name}.{path.name}.log")


class LoggedWriter(VideoWriter):
    """A writer whose ledger is a stream's log, which outlives it; a new one continues there."""

    def __init__(self, path: Path, *, resume: bool = True, **changes: Any) -> None:
        log = log_of(path)
        progress = read_progress(log) if resume else StreamProgress()
        if progress.is_published:
            progress = StreamProgress()
        self.log = StreamLog(log, resume=bool(progress.num_starts))
        if not progress.num_starts:
            self.log.append(opened())
        size: dict[str, Any] = {"width": SIDE, "height": SIDE, "fps": FPS}
        try:
            earlier = video_records(log, progress)
            super().__init__(path, ledger=self.log, earlier=earlier, **(size | changes))
        except UserInputError:
            self.log.close()
            raise

    def _end(self, *, keep: bool, patience_s: float | None = None) -> None:
        super()._end(keep=keep, patience_s=patience_s)
        self.log.close()


def writer_for(path: Path, *, resume: bool = True, keep_on_error: bool = False) -> LoggedWriter:
    return LoggedWriter(path, resume=resume, keep_on_error=keep_on_error)


def write_chunks(writer: VideoWriter, stop: int, *, start: int | None = None) -> None:
    for index in range(writer.earlier_chunks if start is None else start, stop):
        writer.write(greys(index))


def suspended(path: Path, num_chunks: int, *, first: int | None = None) -> None:
    writer = writer_for(path)
    write_chunks(writer, num_chunks if first is None else first + num_chunks, start=first)
    writer.suspend()
    writer.suspend()


def finish(path: Path) -> list[int]:
    """Resume, write the chunks that are missing and return the numbers of all frames."""
    with writer_for(path) as writer:
        write_chunks(writer, len(CHUNK_SIZES))
    assert read_progress(log_of(path)).is_published
    assert list(path.parent.iterdir()) == [path]
    return frame_numbers(path)
