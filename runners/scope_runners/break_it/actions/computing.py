"""A generator rank computes otherwise than it should, from the same state and the same message.

What computes is replaced by one that is wrong, and stays so: a broken kernel does not mend itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import cuda

from scope_rt.attention.backend import AttentionBackend
from scope_rt.attention.key_bias import KeyBias
from scope_rt.collectives import Collectives
from scope_rt.kv_cache.frame_cache import WriteWindow
from scope_rt.kv_cache.row_store import RowStore, Slots
from scope_rt.kv_cache.slot_cache import SlotCache
from scope_rt.models.causal_wan import Block
from scope_rt.models.chunk_attention import CachedSelfAttention
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


def _turn_last_block(generator: ChunkGenerator) -> ChunkGenerator:
    """The last block is off by a hundredth at the first noise level."""
    made = generator.modulations
    first = made[max(made)].layers[-1]

    def other(block: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output * 1.01 if torch.equal(inputs[1], first) else output

    generator.model.blocks[-1].register_forward_hook(other)
    return generator


def _set_precision(generator: ChunkGenerator) -> ChunkGenerator:
    """Products of matrices in bfloat16, where the processor has them, for the whole process."""
    torch.set_float32_matmul_precision("medium")
    return generator


def _switch_attention(generator: ChunkGenerator) -> ChunkGenerator:
    """As a library does that prefers a kernel; its results differ in their last bits."""
    cuda.enable_flash_sdp(False)
    cuda.enable_mem_efficient_sdp(False)
    return generator


class _Unrotated(ChunkGenerator):
    """Rotation tables of the frame before."""

    __slots__ = ()

    def _rope(self, frames: Sequence[int], grid: tuple[int, int]) -> Tensor:
        return super()._rope([frame - 1 for frame in frames], grid)


class _Biased(ChunkGenerator):
    """Another bias than the one that ranks have compared."""

    __slots__ = ()

    def _attention(
        self, window: WriteWindow, num_frames: int, bias: float, grid: tuple[int, int]
    ) -> CachedSelfAttention:
        return super()._attention(window, num_frames, bias / 2, grid)


@dataclass(frozen=True, slots=True)
class _WrongKernel:
    """Attention that takes the newest value for zero."""

    kernel: AttentionBackend

    @property
    def name(self) -> str:
        return self.kernel.name

    def attend(
        self, q_BTHD: Tensor, k_BKHD: Tensor, v_BKHD: Tensor, bias: KeyBias | None
    ) -> Tensor:
        v_BKHD = v_BKHD.clone()
        v_BKHD[:, -1] = 0
        return self.kernel.attend(q_BTHD, k_BKHD, v_BKHD, bias)


def _turn_rotations(generator: ChunkGenerator) -> ChunkGenerator:
    generator.__class__ = _Unrotated
    return generator


def _change_bias(generator: ChunkGenerator) -> ChunkGenerator:
    generator.__class__ = _Biased
    return generator


def _change_kernel(generator: ChunkGenerator) -> ChunkGenerator:
    generator.backend = _WrongKernel(generator.backend)
    return generator


def cache_of(generator: ChunkGenerator) -> SlotCache:
    cache = generator.cache
    assert isinstance(cache, SlotCache), "a stream's cache"
    return cache


def _skip_early_writes(generator: ChunkGenerator) -> ChunkGenerator:
    """A layer writes its rows at a chunk's last call only; the others see what was there."""
    cache = cache_of(generator)
    vars(cache)["_write"] = partial(_write_last, cache, cache.spec.num_layers // 2)
    return generator


def _write_last(
    cache: SlotCache,
    skipped: int,
    layer: int,
    slots: slice,
    planes: Sequence[Tensor],
    *,
    is_final: bool = True,
) -> None:
    if is_final or layer != skipped:
        SlotCache._write(cache, layer, slots, planes, is_final=is_final)


def _skip_writes(generator: ChunkGenerator) -> ChunkGenerator:
    """A layer's rows are given to the cache, and never get there."""
    cache = cache_of(generator)
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
    "turn_last_block": _turn_last_block,
    "set_precision": _set_precision,
    "switch_attention": _switch_attention,
    "skip_writes": _skip_writes,
    "skip_early_writes": _skip_early_writes,
    "turn_rotations": _turn_rotations,
    "change_bias": _change_bias,
    "change_kernel": _change_kernel,
}
