"""A video shows the chunks that were handed to its writer, each in its place."""

from collections.abc import Sequence
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray

from scope_lab.soak.event_log import Shown

_CELLS = 4
_MOST_LOSS = 24
"""What encoding may change in the mean of a cell, out of 255; a different scene is far off."""


def thumbnail(frame_HWC: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The mean colours `[4, 4, 3]` of a picture's cells."""
    height, width, _ = frame_HWC.shape
    cells = frame_HWC[: height // _CELLS * _CELLS, : width // _CELLS * _CELLS]
    split = cells.reshape(_CELLS, height // _CELLS, _CELLS, width // _CELLS, 3)
    means: NDArray[np.float64] = split.mean(axis=(1, 3))
    return means.round().astype(np.uint8)


def complaints(path: Path, chunks: Sequence[Shown]) -> list[str]:
    """What is wrong with the video of `chunks`."""
    middles, end = dict[int, Shown](), 0
    for chunk in chunks:
        middles[end + chunk.num_frames // 2] = chunk
        end += chunk.num_frames
    num_frames, wrong = 0, list[int]()
    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            shown = middles.get(num_frames)
            if shown is not None:
                picture = frame.to_ndarray(format="rgb24").astype(np.uint8)
                seen = thumbnail(picture).astype(int)
                want = np.frombuffer(bytes.fromhex(shown.thumbnail), np.uint8).reshape(seen.shape)
                if np.abs(seen - want).max() > _MOST_LOSS:
                    wrong.append(shown.number)
            num_frames += 1
    found = []
    if num_frames != end:
        found.append(f"the video has {num_frames} frames, {end} were shown")
    if wrong:
        found.append(f"the video shows something else at chunks {wrong[:5]} ({len(wrong)} in all)")
    return found
