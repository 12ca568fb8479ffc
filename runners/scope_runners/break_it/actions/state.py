"""What a generator rank holds from chunk to chunk is changed in its memory.

Nobody is told: shapes, places and objects stay what they were, and only numbers differ.
"""

from collections.abc import Callable, Iterable
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from scope_rt.kv_cache.slot_cache import SlotCache
from scope_rt.models.generator import ChunkGenerator


class How(StrEnum):
    """What is done to the numbers of a tensor."""

    FLIP = "flip"
    """The lowest bit of one number."""
    SWAP = "swap"
    """Two rows change places."""
    SHUFFLE = "shuffle"
    """All rows change places."""
    SAME_SUM = "same_sum"
    """One number becomes larger, another one smaller by as much."""
    NOISE = "noise"
    ZEROS = "zeros"
    NAN = "nan"


def _flip(tensor: Tensor) -> None:
    largest = int(tensor.reshape(-1).float().abs().argmax())
    tensor.view(-1).view(torch.uint8)[largest * tensor.element_size()] ^= 1


def _swap(tensor: Tensor) -> None:
    tensor[[0, -1]] = tensor[[-1, 0]].clone()


def _shuffle(tensor: Tensor) -> None:
    tensor.copy_(tensor.roll(1, dims=0))


def _keep_sum(tensor: Tensor) -> None:
    amount = tensor.abs().max().clone()
    flat = tensor.view(-1)
    flat[0] += amount
    flat[-1] -= amount


def _add_noise(tensor: Tensor) -> None:
    drawn = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))
    if tensor.is_floating_point() and tensor.element_size() > 1:
        tensor += (0.1 * tensor.float().std() * drawn.to(tensor.device)).to(tensor.dtype)
    else:
        tensor.view(torch.uint8).bitwise_xor_((drawn > 0).to(tensor.device, torch.uint8))


_DAMAGES: MappingProxyType[How, Callable[[Tensor], object]] = MappingProxyType(
    {
        How.FLIP: _flip,
        How.SWAP: _swap,
        How.SHUFFLE: _shuffle,
        How.SAME_SUM: _keep_sum,
        How.NOISE: _add_noise,
        How.ZEROS: lambda tensor: tensor.view(torch.uint8).zero_(),
        How.NAN: lambda tensor: tensor.fill_(torch.nan),
    }
)


@torch.inference_mode()
def _damage(tensor: Tensor, how: str) -> None:
    _DAMAGES[How(how)](tensor)


def _damage_weight(generator: ChunkGenerator, *, name: str, how: str) -> ChunkGenerator:
    """A weight of this rank's shard."""
    _damage(generator.model.get_parameter(name).detach(), how)
    return generator


def _damage_rows(generator: ChunkGenerator, *, how: str) -> ChunkGenerator:
    """The values of the newest cached frame, in a layer in the middle."""
    cache = generator.cache
    assert isinstance(cache, SlotCache), "a stream's cache"
    newest, tokens = cache.policy.frames_kept.index(max(cache.frames_kept)), cache.spec.frame_tokens
    slot = cache.policy.slots_kept[newest]
    place = cache.storage.place(slice(slot * tokens, (slot + 1) * tokens))
    first = int(place[0]) if isinstance(place, Tensor) else place.start
    *_, values = cache.storage.rows.parts
    parts: Iterable[Tensor] = values
    if how == How.NAN:  # codes are no numbers, their scales are
        parts = [part for part in values if part.is_floating_point() and part.element_size() > 1]
    part = next(iter(parts))[cache.spec.num_layers // 2, 0]
    _damage(part[first : first + tokens], how)
    return generator


def _damage_text(generator: ChunkGenerator, *, how: str) -> ChunkGenerator:
    """The text values of the last layer."""
    *_, last = generator.text
    _damage(last.v[0], how)
    return generator


def _damage_modulation(generator: ChunkGenerator, *, how: str) -> ChunkGenerator:
    """The modulation of the first step, in the last layer."""
    first, *_ = generator.modulations.values()
    _damage(first.layers[-1], how)
    return generator


def _move_origin(generator: ChunkGenerator, *, by: int) -> ChunkGenerator:
    """The frame that the cache's positions are counted from."""
    generator._origin_frame += by
    return generator


ACTIONS: dict[str, Callable[..., Any]] = {
    "damage_weight": _damage_weight,
    "damage_rows": _damage_rows,
    "damage_text": _damage_text,
    "damage_modulation": _damage_modulation,
    "move_origin": _move_origin,
}
