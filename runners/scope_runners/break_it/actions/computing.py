"""A generator rank computes otherwise than it should, from the same state and the same message.

What computes is replaced by one that is wrong, and stays so: a broken kernel does not mend itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scope_rt.collectives import Collectives
from scope_rt.kv_cache.row_store import RowStore, Slots
from scope_rt.kv_cache.slot_cache import SlotCache
from scope_rt.models.causal_wan import Block
from scope_rt.models.generator import ChunkGenerator
from scope_rt.models.noise import NoiseSource


@dataclass(frozen=True, slots=True)
class _OtherNoise:
    """The noise of another seed."""

    noise: NoiseSource

    def draw(self, *, base_seed: int, **of: Any) -> Tensor:
        return self.noise.draw(base_seed=base_seed + 1, **of)


@dataclass(slots=True)
class _NoisySums:
    """Sums that are off by a thousandth."""

    group: Collectives
    random: torch.Generator

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        summed = self.group.all_reduce_sum(tensor)
        drawn = torch.randn(summed.shape, generator=self.random).to(summed.device)
        summed.mul_((1 + 1e-3 * drawn).to(summed.dtype))
        return summed


def _draw_other_noise(generator: ChunkGenerator) -> ChunkGenerator:
    """The re-noise of a step is not the planned one."""
    generator.noise = _OtherNoise(generator.noise)
    return generator


def _add_to_sums(generator: ChunkGenerator, *, seed: int) -> ChunkGenerator:
    """All-reduces give this rank noisy sums; ranks of one `seed` have the same noise."""
    model = generator.model
    noisy = _NoisySums(model.group, torch.Generator().manual_seed(seed))
    model.group = noisy
    for block in model.blocks:
        assert isinstance(block, Block)
        block.group = noisy
    return generator


def _turn_output(generator: ChunkGenerator) -> ChunkGenerator:
    """The last linear layer, which every rank has whole, is off by a thousandth."""

    def other(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output * 1.001

    generator.model.proj_out.register_forward_hook(other)
    return generator


def _set_precision(generator: ChunkGenerator) -> ChunkGenerator:
    """Products of matrices in bfloat16, where the processor has them, for the whole process."""
    torch.set_float32_matmul_precision("medium")
    return generator


def _skip_writes(generator: ChunkGenerator) -> ChunkGenerator:
    """A layer's rows are given to the cache, and never get there."""
    cache = generator.cache
    assert isinstance(cache, SlotCache), "a stream's cache"
    rows = cache.storage.rows
    vars(rows)["write"] = partial(_write_all_but, rows, cache.spec.num_layers // 2)
    return generator


def _write_all_but(
    rows: RowStore,
    skipped: int,
    layer: int,
    slots: Slots,
    planes: Sequence[Tensor],
    *,
    batch: int | slice = slice(None),
) -> list[tuple[Tensor, ...]]:
    if layer == skipped:
        return [rows._codec.encode(plane) for plane in planes]
    return RowStore.write(rows, layer, slots, planes, batch=batch)


ACTIONS: dict[str, Callable[..., Any]] = {
    "draw_other_noise": _draw_other_noise,
    "add_to_sums": _add_to_sums,
    "turn_output": _turn_output,
    "set_precision": _set_precision,
    "skip_writes": _skip_writes,
}
