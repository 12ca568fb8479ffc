"""Decoding the retained latents again rebuilds decoder and context to the bit, at every cut."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from scope_rt.control.anchor import AnchorFrames
from scope_rt.control.context import ContextMemory
from scope_rt.control.recompute import RecomputeAnchor
from scope_rt.control.tail import StreamTail, TailChunk
from scope_rt.models.recipe import Recipe
from scope_rt.vae.codec import StreamingDecoder
from scope_rt.vae.tiny import TinyCodecConfig, TinyVideoCodec
from scope_rt.watchdog import Watchdog
from tests.control.memory_mesh import FIELD, STRIDE, FieldDecoder
from tests.tiny_folder import KREA_RECIPE, RECIPE

STARTS = (0, 3, 6, 9, 12, 15, 0, 3, 6, 9, 12, 15, 18)
"""First latent frames of the chunks of two epochs."""
BLOCK = RECIPE.frames_per_block


@dataclass(frozen=True, slots=True)
class Case:
    """A codec and what rank0 remembers beside it."""

    codec: str
    recipe: Recipe
    anchor: RecomputeAnchor = RecomputeAnchor.LATENT

    @property
    def num_frames(self) -> int:
        field = FIELD if self.codec == "field" else TinyVideoCodec.decoder_context_frames
        return field + self.recipe.context_frames

    def __str__(self) -> str:
        recipe = self.recipe
        return f"{self.codec}-{recipe.cache_upkeep}-{self.anchor}-sinks{recipe.sink_frames}"

    def decoder(self) -> StreamingDecoder:
        if self.codec == "field":
            return FieldDecoder()
        torch.manual_seed(0)
        sizes = TinyCodecConfig(latent_channels=2, wide_channels=8, narrow_channels=4, num_blocks=1)
        codec = TinyVideoCodec(sizes)
        for weight in codec.parameters():  # at first its corrections are zero
            torch.nn.init.normal_(weight, std=0.2)
        return codec.eval().streaming_decoder()

    def context(self) -> ContextMemory:
        frames = AnchorFrames(
            stand_in_anchor,
            num_latents=self.recipe.context_frames,
            first_latent_frames=STRIDE,
            temporal_stride=STRIDE,
        )
        return ContextMemory(self.recipe, frames, anchor=self.anchor)


def stand_in_anchor(frames_BTHWC: Tensor) -> Tensor:
    """A latent frame that depends on all of `frames_BTHWC`."""
    return frames_BTHWC.double().mean((1, 2, 3, 4)).float().expand(1, 1, 2, 2, 2)


CASES = [
    Case(codec, recipe, anchor)
    for codec in ("embedded", "field")
    for recipe, anchor in (
        (RECIPE, RecomputeAnchor.LATENT),
        (replace(RECIPE, sink_frames=0), RecomputeAnchor.LATENT),
        (replace(RECIPE, sink_frames=4, window_frames=9), RecomputeAnchor.LATENT),
        (KREA_RECIPE, RecomputeAnchor.LATENT),
        (KREA_RECIPE, RecomputeAnchor.DECODED),
    )
]


def latents_of(chunk: int) -> Tensor:
    generator = torch.Generator().manual_seed(chunk)
    return torch.randn(1, BLOCK, 2, 2, 2, generator=generator)


@dataclass
class Rank0:
    """What is rebuilt, as it was before the process was lost."""

    decoder: StreamingDecoder
    context: ContextMemory

    def show(self, chunk: int) -> Tensor:
        """The frames of a chunk."""
        if STARTS[chunk] == 0:
            self.decoder.reset()
            self.context.reset()
        self.context.remember_latents(latents_of(chunk))
        frames = self.decoder.decode(latents_of(chunk))
        self.context.remember_frames(frames)
        return frames


def tails(case: Case, num_pending: int) -> list[StreamTail]:
    """The tail after every chunk, of a stream that was never lost."""
    rank0, tail, found = Rank0(case.decoder(), case.context()), StreamTail(), []
    for chunk, start in enumerate(STARTS):
        rank0.show(chunk)
        one = TailChunk(start_frame=start, latents=latents_of(chunk), latents_sha256="")
        tail = tail.followed_by(one, sinks=rank0.context.sinks)
        held = min(num_pending, chunk + 1)
        tail = tail.trimmed(num_pending=held, num_frames=case.num_frames)
        found.append(tail)
    return found


def outcome(rank0: Rank0, chunk: int) -> list[Tensor]:
    frames = rank0.show(chunk)
    return [frames, rank0.context.context(), rank0.context.sinks]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("num_pending", [0, pytest.param(1, marks=pytest.mark.lab), 3])
def test_the_tail_rebuilds_decoder_and_context_to_the_bit_at_every_cut(
    case: Case, num_pending: int
) -> None:
    whole = Rank0(case.decoder(), case.context())
    want = [[each.clone() for each in outcome(whole, chunk)] for chunk in range(len(STARTS))]
    for cut, tail in enumerate(tails(case, num_pending)):
        shown = [frames for frames, _, _ in want[: cut + 1]]
        again = Rank0(case.decoder(), case.context())
        frames = list(tail.replay(again.decoder, again.context, Watchdog()))
        num_shown = min(num_pending, cut + 1)
        pending = frames[len(frames) - num_shown :], shown[cut + 1 - num_shown :]
        for mine, theirs in zip(*pending, strict=True):
            assert torch.equal(mine, theirs), f"cut {cut}: a pending chunk is shown otherwise"
        assert torch.equal(again.context.context(), want[cut][1]), f"cut {cut}"
        assert torch.equal(again.context.sinks, want[cut][2]), f"cut {cut}"
        for chunk in range(cut + 1, len(STARTS)):
            for mine, theirs in zip(outcome(again, chunk), want[chunk], strict=True):
                assert torch.equal(mine, theirs), f"cut {cut}, chunk {chunk}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_frame_less_does_not_rebuild_it(case: Case) -> None:
    """The claim above can fail: with a chunk less the next frames, or the context, are others."""
    tail = tails(case, 1)[-1]
    short = replace(tail, chunks=tail.chunks[-1:])
    whole, again = (Rank0(case.decoder(), case.context()) for _ in range(2))
    frames = [whole.show(chunk) for chunk in range(len(STARTS))]
    (mine,) = short.replay(again.decoder, again.context, Watchdog())
    assert not torch.equal(mine, frames[-1])


@pytest.mark.parametrize("num_pending", [0, 1, 3])
def test_a_tail_reaches_back_as_far_as_it_must_and_no_further_than_its_epoch(
    num_pending: int,
) -> None:
    case = CASES[-1]
    for cut, tail in enumerate(tails(case, num_pending)):
        num_before = len(tail.chunks) - min(num_pending, cut + 1)
        assert num_before * BLOCK < case.num_frames + BLOCK
        if num_pending == 0 and STARTS[cut] == 0:
            assert [chunk.start_frame for chunk in tail.chunks] == [0]


def test_an_epoch_that_began_with_the_oldest_pending_chunk_needs_nothing_before_it() -> None:
    tail = tails(CASES[0], 1)[STARTS.index(0, 1)]
    assert [chunk.start_frame for chunk in tail.chunks] == [0]
