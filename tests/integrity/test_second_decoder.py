"""The second decoder decodes what the first one did, and no chunk waits for its whole past."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from scope_contracts.errors import IntegrityError
from scope_contracts.integrity import IntegrityLevel
from scope_rt.checks import Checks
from scope_rt.integrity.pictures import PictureCheck, RankZeroParts
from scope_rt.tensor_digests import TensorDigests
from scope_rt.vae.codec import CodecSizes

CONTEXT, FRAMES, SIDE = 8, 3, 2
"""A picture shows the latent frames before it too: two chunks of them, and a part of one."""
SIZES = CodecSizes(
    latent_channels=1,
    spatial_stride=1,
    temporal_stride=1,
    first_latent_frames=1,
    decoder_context_frames=CONTEXT,
)
WITHIN, TURN = 4, 16
"""One chunk in 32 is decoded again."""


class SumDecoder:
    """Shows the sum of a latent frame and those before it, of which it knows how many."""

    def __init__(self, decoded: list[int]) -> None:
        self._decoded = decoded
        self.reset()

    def reset(self) -> None:
        self._past: list[Tensor] = []

    def decode(self, latents_BFCHW: Tensor) -> Tensor:
        self._decoded.append(latents_BFCHW.shape[1])
        pictures = []
        for latent_BCHW in latents_BFCHW.unbind(1):
            self._past = [*self._past, latent_BCHW][-1 - CONTEXT :]
            pictures.append(torch.stack(self._past).sum(0))
        frames = torch.stack(pictures, 1).movedim(2, -1)
        return frames.mul(37).remainder(251).byte().expand(-1, -1, -1, -1, 3)


def _given(latents: Tensor | None) -> Tensor | None:
    return latents


def run(
    level: IntegrityLevel,
    *,
    num_chunks: int,
    cuts: Sequence[int] = (0,),
    first: int = 0,
    spoil: Callable[[int, Tensor], Tensor] = lambda chunk, frames: frames,
) -> list[int]:
    """Latent frames that were decoded again with each chunk."""
    again = list[int]()
    parts = RankZeroParts(
        decoder=lambda: SumDecoder(again),
        codec=SIZES,
        latent_size=(SIDE, SIDE),
        weights=TensorDigests(),
        encoded_again=lambda: None,
    )
    check = PictureCheck(parts, level=level, within=WITHIN, checks=Checks())
    monitored, counts = SumDecoder([]), list[int]()
    epoch: list[Tensor] = []
    generator = torch.Generator().manual_seed(0)
    for chunk in range(num_chunks):
        latents = torch.randint(9, (1, FRAMES, 1, SIDE, SIDE), generator=generator)
        if chunk in cuts:
            monitored.reset()
            epoch = []
        before = torch.cat(epoch, 1)[:, -CONTEXT:] if epoch else None
        past = partial(_given, before)
        epoch.append(latents)
        frames = spoil(chunk, monitored.decode(latents))
        again.clear()
        if chunk >= first:
            check.verify(chunk, latents, frames, before=past)
        counts.append(sum(each for each in again if each != 1))  # 1: the fixed latents
    return counts


def test_only_what_a_picture_shows_is_decoded_and_no_chunk_waits_for_more_than_itself() -> None:
    counts = run(IntegrityLevel.DEFAULT, num_chunks=2 * TURN)
    assert sum(counts[: TURN + 1]) == CONTEXT + FRAMES
    assert max(counts) == FRAMES


def test_who_comes_in_the_middle_of_it_decodes_the_past_at_once() -> None:
    counts = run(IntegrityLevel.DEFAULT, num_chunks=TURN + 1, first=TURN - 1)
    assert counts[TURN] == CONTEXT + FRAMES


@pytest.mark.parametrize("cut", [TURN - 3, TURN - 1, TURN])
def test_a_cut_before_its_turn_is_followed(cut: int) -> None:
    counts = run(IntegrityLevel.DEFAULT, num_chunks=TURN + 1, cuts=(0, cut))
    assert max(counts) == FRAMES


@pytest.mark.parametrize("level", [IntegrityLevel.DEFAULT, IntegrityLevel.STRICT])
@pytest.mark.parametrize("cuts", [(0,), (0, TURN - 2)])
def test_another_picture_is_found_at_its_turn(level: IntegrityLevel, cuts: Sequence[int]) -> None:
    def spoil(chunk: int, frames: Tensor) -> Tensor:
        return frames.flip(1) if chunk == TURN else frames

    with pytest.raises(IntegrityError, match=f"chunk {TURN}: .* another picture"):
        run(level, num_chunks=TURN + 1, cuts=cuts, spoil=spoil)


def test_a_chunk_of_one_value_is_decoded_again_at_once() -> None:
    def spoil(chunk: int, frames: Tensor) -> Tensor:
        return torch.zeros_like(frames) if chunk == 3 else frames

    with pytest.raises(IntegrityError, match=r"chunk 3: .* another picture"):
        run(IntegrityLevel.DEFAULT, num_chunks=5, spoil=spoil)
