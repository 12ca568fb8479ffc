"""What enters and leaves the blocks is changed, or what is made for many chunks while it is made.

What computes is replaced by one that is wrong, and stays so.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from scope_contracts.envelope import LATENTS_IN, PPEnvelope
from scope_rt.models.causal_wan import Modulation, TextKV
from scope_rt.models.generator import ChunkGenerator
from scope_rt.models.noise import INITIAL, SeededNoise

_OFF = 1.001
"""What is wrong is off by a thousandth."""


def _change_patches(generator: ChunkGenerator) -> ChunkGenerator:
    """The first block is given one token that the patch embedding did not make."""

    def other(block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x_BFSC, *rest = args
        x_BFSC = x_BFSC.clone()
        x_BFSC[:, -1, -1] *= _OFF
        return (x_BFSC, *rest)

    generator.model.blocks[0].register_forward_pre_hook(other)
    return generator


def _change_head(generator: ChunkGenerator) -> ChunkGenerator:
    """The head's product is off for one token."""

    def other(layer: nn.Module, args: tuple[Any, ...], out_BFSC: Tensor) -> Tensor:
        out_BFSC = out_BFSC.clone()
        out_BFSC[:, -1, -1] *= _OFF
        return out_BFSC

    generator.model.proj_out.register_forward_hook(other)
    return generator


def _change_schedule(generator: ChunkGenerator) -> ChunkGenerator:
    """Noise levels are those of another shift, which all timesteps' modulations are not."""
    schedule = generator.schedule
    generator.schedule = replace(schedule, shift=schedule.shift * _OFF)
    return generator


def _draw_other_start(
    planned: tuple[PPEnvelope, dict[str, Tensor]],
) -> tuple[PPEnvelope, dict[str, Tensor]]:
    """The chunk starts from the noise of another seed, on all ranks."""
    envelope, tensors = planned
    given = tensors[LATENTS_IN]
    noise = SeededNoise().draw(
        base_seed=envelope.base_seed + 1,
        cache_epoch=envelope.cache_epoch,
        chunk_index=envelope.chunk_index,
        step=INITIAL,
        shape=tuple(given.shape),
    )
    return envelope, tensors | {LATENTS_IN: noise.to(given.dtype)}


class _Unclean(ChunkGenerator):
    """A clean pass at the timestep of the first step."""

    __slots__ = ()

    def _modulation(self, timestep: float) -> Modulation:
        return super()._modulation(timestep or max(self.modulations))


def _soil_clean_pass(generator: ChunkGenerator) -> ChunkGenerator:
    generator.__class__ = _Unclean
    return generator


def _feed_other_latents(generator: ChunkGenerator) -> ChunkGenerator:
    """The clean pass is given other latents than were shown."""
    generator.feedback = lambda chunk_index, latents_BFCHW: latents_BFCHW + 1e-3
    return generator


@dataclass(frozen=True, slots=True)
class _ScaledText:
    """Text K/V that are off from the moment they are made."""

    made: Callable[[Tensor], list[TextKV]]

    def __call__(self, text_BGLE: Tensor) -> list[TextKV]:
        return [TextKV(kv.k * 1.01, kv.v * 1.01) for kv in self.made(text_BGLE)]


def _scale_text(generator: ChunkGenerator) -> ChunkGenerator:
    vars(generator.model)["text_kv"] = _ScaledText(generator.model.text_kv)
    return generator


def _remake_modulations(generator: ChunkGenerator) -> ChunkGenerator:
    """All are made again, each for the timestep after its own."""
    made = generator.model.modulation
    generator.modulations.clear()
    vars(generator.model)["modulation"] = lambda times_BF: made(times_BF + 1)
    return generator


ACTIONS: dict[str, Callable[..., Any]] = {
    "change_patches": _change_patches,
    "change_head": _change_head,
    "change_schedule": _change_schedule,
    "draw_other_start": _draw_other_start,
    "soil_clean_pass": _soil_clean_pass,
    "feed_other_latents": _feed_other_latents,
    "scale_text": _scale_text,
    "remake_modulations": _remake_modulations,
}
