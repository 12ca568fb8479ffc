"""Pictures that chunks begin with are seen in them, the more the less noise is added."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from scope_contracts.envelope import INPUT_LATENTS
from scope_contracts.errors import IntegrityError, UserInputError
from scope_rt.config import StreamConfig
from scope_rt.control.chunk import Chunk
from scope_rt.control.motion_noise import MotionNoise
from scope_rt.control.video_input import InputPictures
from scope_rt.faults import FaultPoint
from scope_rt.instruments import Instruments
from scope_rt.models.generator import ChunkGenerator
from scope_rt.record.reader import read_history
from scope_rt.session import StreamSession
from scope_rt.stream_setup import StreamSetup
from scope_runners.replay import main as replay
from tests.integrity.corruption import Change
from tests.tiny_folder import KREA_RECIPE, write_tiny_folder

Frames = NDArray[np.uint8]


class Given:
    """The same moving pictures for each chunk, at one noise scale; notes what it was asked for."""

    def __init__(self, noise_scale: float, size: tuple[int, int] = (64, 64)) -> None:
        self.asked: list[int] = []
        self._noise_scale, self._size = noise_scale, size

    def newest(self, num_frames: int) -> InputPictures | None:
        self.asked.append(num_frames)
        return InputPictures(frames=moving(num_frames, self._size), noise_scale=self._noise_scale)


def moving(num_frames: int, size: tuple[int, int] = (64, 64)) -> Frames:
    """A bright square on a dark ground, which the embedded codec keeps well."""
    frames = np.full((num_frames, *size, 3), (10, 15, 60), np.uint8)
    height, width = size
    for index, frame in enumerate(frames):
        left = width // 4 + index % (width // 4)
        frame[height // 4 : height // 2, left : left + width // 4] = (220, 40, 40)
    return frames


def decibels(got: Frames, want: Frames) -> float:
    error = float(np.mean((got.astype(np.float64) - want) ** 2))
    return 10 * float(np.log10(255**2 / error))


def streamed(given: Given | None, *, num_chunks: int = 4, **settings: Any) -> list[Chunk]:
    with StreamSession(StreamConfig.of(**({"seed": 3} | settings))) as session:
        return list(
            session.stream("a red square, on navy", num_chunks=num_chunks, video_input=given)
        )


def shown(chunks: Sequence[Chunk]) -> Frames:
    return np.concatenate([chunk.frames for chunk in chunks])


def ceiling(frames: Frames) -> float:
    """What the codec alone keeps of the pictures."""
    codec = StreamSetup.of(StreamConfig.of()).codec
    latents = codec.streaming_encoder().encode(torch.from_numpy(frames)[None])
    return decibels(codec.streaming_decoder().decode(latents)[0].numpy(), frames)


def test_pictures_are_recognised_at_low_noise_and_fade_with_more() -> None:
    quiet = Given(0.05)
    frames = shown(streamed(quiet))
    assert quiet.asked == [12] * 4
    wanted = np.concatenate([moving(12)] * 4)
    kept = [decibels(frames, wanted)]
    kept += [decibels(shown(streamed(Given(scale))), wanted) for scale in (0.3, 0.9)]
    assert kept[0] > kept[1] > kept[2]
    # The mean square of what noise of sigma 0.05 adds to latents is a fortieth of their own.
    assert kept[0] > ceiling(wanted) - 6.0
    plain = decibels(shown(streamed(None)), wanted)
    assert abs(kept[2] - plain) < abs(kept[0] - plain)


@pytest.mark.parametrize("recipe", ["clean_pass", "recompute"])
@pytest.mark.parametrize("level", ["default", "strict"])
def test_a_chunk_is_the_pictures_and_its_own_noise_and_the_ranks_verify_both(
    tmp_path: Path, recipe: str, level: str
) -> None:
    folder = write_tiny_folder(tmp_path, *([KREA_RECIPE] if recipe == "recompute" else []))
    settings = {"model": folder, "seed": 3, "integrity": level, "log": tmp_path / "log"}
    given = Given(0.25, (16, 32))
    streamed(given, num_chunks=12, **settings)
    history = read_history(tmp_path / "log")
    envelopes = [history.envelopes[index] for index in range(12)]
    assert all(INPUT_LATENTS in [spec.name for spec in each.tensors] for each in envelopes)
    steps = {each.denoising_step_list for each in envelopes}
    assert len(steps) == 1
    (timestep,) = steps.pop()
    assert timestep == pytest.approx(250, abs=1000 * 0.5 / 64 + 2.5)
    calls = {each.expected_generator_calls - each.do_kv_recompute for each in envelopes}
    assert calls == {1 + (recipe == "clean_pass")}


def test_no_input_is_a_stream_as_it_is_without() -> None:
    class Nothing:
        def newest(self, num_frames: int) -> InputPictures | None:
            return None

    with StreamSession(StreamConfig.of(seed=3)) as session:
        got = list(session.stream("a red circle", num_chunks=2, video_input=Nothing()))
    with StreamSession(StreamConfig.of(seed=3)) as session:
        want = list(session.stream("a red circle", num_chunks=2))
    assert [each.latents_sha256 for each in got] == [each.latents_sha256 for each in want]


def test_the_input_may_begin_and_end_in_the_middle_of_an_epoch() -> None:
    class Sometimes(Given):
        def newest(self, num_frames: int) -> InputPictures | None:
            pictures = super().newest(num_frames)
            return pictures if len(self.asked) in (2, 3) else None

    chunks = streamed(Sometimes(0.05), num_chunks=4)
    kept = [decibels(chunk.frames, moving(12)) for chunk in chunks]
    assert min(kept[1:3]) > max(kept[0], kept[3])


def _halved(value: tuple[Any, dict[str, Tensor]]) -> tuple[Any, dict[str, Tensor]]:
    envelope, tensors = value
    return envelope, tensors | {INPUT_LATENTS: tensors[INPUT_LATENTS] * 0.5}


def test_pictures_that_change_before_they_leave_are_named() -> None:
    faults = Change(FaultPoint.PLANNED, 1, _halved)
    session = StreamSession(StreamConfig.of(seed=3), instruments=Instruments(faults=faults))
    chunks = session.stream("a red circle", num_chunks=3, video_input=Given(0.25))
    with pytest.raises(IntegrityError, match=r"chunk 1.*latents of the video input"), session:
        list(chunks)


def test_a_rank_that_mixes_them_wrongly_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = lambda self, steps: 0.26  # noqa: E731
    monkeypatch.setattr(ChunkGenerator, "_first_sigma", wrong)
    with pytest.raises(IntegrityError, match=r"chunk 0.*input"):
        streamed(Given(0.25), integrity="strict")


def test_a_recording_with_video_input_is_replayed_up_to_it_or_refused(tmp_path: Path) -> None:
    class Later(Given):
        def newest(self, num_frames: int) -> InputPictures | None:
            pictures = super().newest(num_frames)
            return pictures if len(self.asked) > 2 else None

    for name, given in (("later", Later(0.2)), ("whole", Given(0.2))):
        log = tmp_path / f"{name}.scope"
        streamed(given, log=log, record_latents=True)
    assert replay([str(tmp_path / "later.scope")]) == 0
    assert replay([str(tmp_path / "whole.scope")]) == 2


@pytest.mark.parametrize(
    ("frames", "scale", "sentence"),
    [
        (moving(3), 0.0, "noise_scale: got 0"),
        (moving(3), 1.0, "noise_scale: got 1"),
        (moving(0), 0.5, "give one picture or more"),
        (moving(3).astype(np.float32), 0.5, "give one picture or more"),
    ],
)
def test_what_is_no_input_is_refused_by_name(frames: Any, scale: float, sentence: str) -> None:
    with pytest.raises(UserInputError, match=sentence):
        InputPictures(frames=frames, noise_scale=scale)


def test_pictures_of_another_size_are_refused_by_name() -> None:
    with pytest.raises(UserInputError, match=r"got pictures \[32, 32, 3\], want \[64, 64, 3\]"):
        streamed(Given(0.2, (32, 32)))


def test_motion_lowers_the_noise_slowly_and_rest_raises_it() -> None:
    still, fast = moving(1).repeat(12, axis=0), np.stack([moving(1)[0], 255 - moving(1)[0]] * 6)
    noise = MotionNoise(low=0.2, high=0.8, inertia=0.5).after(still)
    assert noise.scale == pytest.approx(0.8)
    scales = []
    for _ in range(4):
        noise = noise.after(fast)
        scales.append(noise.scale)
    assert scales == pytest.approx([0.5, 0.35, 0.275, 0.2375])
    assert replace(noise, scale=0.3).after(still).scale == pytest.approx(0.55)
    with pytest.raises(UserInputError, match="want 0 < low <= high < 1"):
        MotionNoise(low=0.5, high=0.2)
