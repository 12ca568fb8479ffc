"""What a stream begins with is the picture that was encoded, or the stream ends by name."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from scope_contracts.envelope import LATENTS_IN, PPEnvelope
from scope_contracts.errors import IntegrityError, PreflightError, ScopeError
from scope_rt.checks import Checks
from scope_rt.config import StreamConfig
from scope_rt.control.chunk import Chunk
from scope_rt.faults import FaultPoint
from scope_rt.models.generator import ChunkGenerator
from scope_rt.stream_setup import StreamSetup
from scope_rt.vae.tiny import TinyStreamingEncoder
from tests.integrity.audited import nothing
from tests.integrity.corruption import Change
from tests.integrity.rank0_streams import UNTOUCHED, shown_with
from tests.tiny_folder import FRAMEWISE_RECIPE, write_tiny_folder

Planned = tuple[PPEnvelope, dict[str, Tensor]]


@pytest.fixture(scope="module")
def begins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Model and picture of a stream."""
    place = tmp_path_factory.mktemp("begins")
    folder = write_tiny_folder(place / "model", FRAMEWISE_RECIPE)
    noise = np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)
    Image.fromarray(noise).save(place / "start.png")
    return {"model": folder, "image": place / "start.png"}


def nudged(planned: Planned) -> Planned:
    envelope, tensors = planned
    return envelope, tensors | {LATENTS_IN: tensors[LATENTS_IN] + 1e-3}


def nudged_messages(messages: list[Planned]) -> list[Planned]:
    return [nudged(message) for message in messages]


def remembers_another(generator: ChunkGenerator) -> None:
    """The clean pass writes other latents into the cache than are shown."""
    generator.feedback = lambda chunk, latents: latents + 1e-3


def with_steps(*steps: float) -> Callable[[Planned], Planned]:
    def change(planned: Planned) -> Planned:
        envelope, tensors = planned
        plan = replace(
            envelope,
            denoising_step_list=steps,
            num_denoise_steps=len(steps),
            expected_generator_calls=len(steps) + envelope.clean_pass,
        )
        return plan, tensors

    return change


@pytest.mark.parametrize("level", ["default", "strict"])
@pytest.mark.parametrize(
    ("point", "change", "said"),
    [
        (FaultPoint.PLANNED, nudged, "rank 0: latents of the start frame changed"),
        (FaultPoint.SENDING, nudged_messages, "rank 0: latents of the start frame changed"),
        (FaultPoint.ENTERED, nudged, "rank 0: latents of the start frame changed"),
        (FaultPoint.GENERATOR, remembers_another, "rank 0, call 0: input, number"),
    ],
)
def test_another_start_frame_than_was_encoded_is_never_shown(
    begins: dict[str, Any], level: str, point: FaultPoint, change: Any, said: str
) -> None:
    fault, shown = Change(point, 0, change), list[Chunk]()
    with pytest.raises(IntegrityError, match=f"chunk 0[:,] {said}"):
        shown_with(fault, shown=shown, integrity=level, **begins)
    assert fault.was_made
    assert shown == []


def test_the_same_is_shown_where_nothing_is_verified(begins: dict[str, Any]) -> None:
    fault = Change(FaultPoint.PLANNED, 0, nudged)
    clean = shown_with(UNTOUCHED, integrity="off", **begins)
    changed = shown_with(fault, integrity="off", **begins)
    assert clean[0].latents_sha256 != changed[0].latents_sha256


@pytest.mark.parametrize(
    ("chunk", "steps", "said"),
    [
        (0, (1000.0, 500.0), "num_denoise_steps: got 2, want 0: chunk 0 is the start frame"),
        (1, (), "num_denoise_steps: got 0, want at least 1; only the start frame"),
        (1, FRAMEWISE_RECIPE.timesteps, "chunk 1: rank 0: plans denoising_step_list "),
        (2, FRAMEWISE_RECIPE.first_chunk_timesteps, "chunk 2: rank 0: plans denoising_step_list "),
    ],
)
def test_a_plan_with_other_steps_than_a_start_frame_asks_for_never_leaves_rank0(
    begins: dict[str, Any], chunk: int, steps: tuple[float, ...], said: str
) -> None:
    fault = Change(FaultPoint.PLANNED, chunk, with_steps(*steps))
    shown = list[Chunk]()
    with pytest.raises(ScopeError, match=said) as refused:
        shown_with(fault, shown=shown, **begins)
    assert isinstance(refused.value, PreflightError | IntegrityError)
    assert len(shown) == chunk


def test_without_the_second_plan_the_same_steps_get_through(begins: dict[str, Any]) -> None:
    fault = Change(FaultPoint.PLANNED, 2, with_steps(*FRAMEWISE_RECIPE.first_chunk_timesteps))
    checks = replace(Checks(), planned=nothing)
    shown = shown_with(fault, checks=checks, num_chunks=4, **begins)
    assert [chunk.generator_calls for chunk in shown] == [1, 4, 4, 3]


def test_a_picture_that_is_encoded_twice_alike_or_not_at_all(
    begins: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, drift = TinyStreamingEncoder.encode, iter((0.0, 1e-3, 0.0, 1e-3))
    monkeypatch.setattr(
        TinyStreamingEncoder, "encode", lambda self, frames: encode(self, frames) + next(drift)
    )
    with pytest.raises(IntegrityError, match=r"start.png: rank 0: its latents, encoded again, ch"):
        StreamSetup.of(StreamConfig.of(**begins))
    monkeypatch.setattr(
        TinyStreamingEncoder, "encode", lambda self, frames: encode(self, frames) * torch.inf
    )
    with pytest.raises(ScopeError, match="encodes it to numbers that are not finite; choose"):
        StreamSetup.of(StreamConfig.of(**begins))
