"""A gist is the mean of the rows that it stands for: worked out again while those still lie there.

In `strict` in all layers; else in one layer in turn of every gist.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from scope_contracts.integrity import suspect_from
from scope_rt.checks import Checks
from scope_rt.integrity.cached_rows import largest_loss
from scope_rt.integrity.linear_sums import to_array
from scope_rt.kv_cache.gists import GistCache, Pooling
from scope_rt.models.generator import ChunkGenerator

_MEAN_ROUNDOFF = 2.0**-24
"""Means are taken in float32."""


class _Off(NamedTuple):
    layer: int
    where: str
    name: str
    got: float
    want: float
    bound: float


class PooledRows:
    """One generator rank's; sees gists from when it is built."""

    def __init__(
        self, generator: ChunkGenerator, *, rank: int, checks: Checks, is_strict: bool
    ) -> None:
        self._rank, self._checks, self._is_strict = rank, checks, is_strict
        self._num_seen = 0
        self._found: list[_Off] = []
        self._layers: set[int] = set()
        """That were looked at since `end`."""
        self._right_until: dict[int, int] = {}
        """By layer: the last chunk in which it was looked at."""
        if isinstance(generator.cache, GistCache):
            generator.cache.see_pooled = self._see

    def end(self, chunk: int) -> None:
        """Raises `IntegrityError` naming the first gist of the chunk that is off."""
        found, self._found = self._found, []
        for off in found:
            where = f"chunk {chunk}, rank {self._rank}, layer {off.layer}, {off.where}"
            since = chunk if self._is_strict else self._right_until.get(off.layer, -1) + 1
            with suspect_from(since):
                self._checks.cached_rows(where, off.name, off.got, off.want, off.bound)
        self._right_until.update(dict.fromkeys(self._layers, chunk))
        self._layers.clear()

    def _see(self, cache: GistCache, pooling: Pooling) -> None:
        num_layers = cache.spec.num_layers
        layers = range(num_layers) if self._is_strict else [self._num_seen % num_layers]
        self._num_seen += 1
        frame = cache.frames_by_slot[pooling.target]
        where = f"gist of frame {frame}"
        num_other = _num_other_sources(cache, pooling, frame)
        for layer in layers:
            if num_other:
                self._found.append(_Off(layer, where, "sources of a gist", num_other, 0, 0))
            self._found += _off_in(cache, pooling, layer, where)
        self._layers.update(layers)


def _num_other_sources(cache: GistCache, pooling: Pooling, frame: int) -> int:
    """Frame slots that are not those of the group that begins with `frame`."""
    spec = cache.spec
    in_full, group = spec.sink_frames + spec.window_frames, spec.gists.group
    level, length = (pooling.target - in_full) // group, 1
    first = frame - spec.sink_frames
    if level == 0:
        slots = [spec.sink_frames + (first + i) % spec.window_frames for i in range(group)]
    else:
        slots = [in_full + (level - 1) * group + i for i in range(group)]
        length = group**level
    frames = [frame + i * length for i in range(group)]
    lie_there = [cache.frames_by_slot.get(slot) for slot in pooling.sources]
    pairs = zip(pooling.sources, slots, lie_there, frames, strict=True)
    return sum(source != slot or there != wanted for source, slot, there, wanted in pairs)


def _off_in(cache: GistCache, pooling: Pooling, layer: int, where: str) -> Iterator[_Off]:
    """What is furthest off in keys and in values of a layer."""
    tokens, codec = cache.spec.frame_tokens, cache.spec.codec
    stored = torch.finfo(cache.rows(layer, slice(0, 0))[0].dtype).eps / 2
    slots = [slice(at * tokens, (at + 1) * tokens) for at in (*pooling.sources, pooling.target)]
    rows = [cache.rows(layer, each) for each in slots]
    for name, planes in zip(("keys", "values"), zip(*rows, strict=True), strict=True):
        *sources, got = (to_array(plane) for plane in planes)
        want, size = np.mean(sources, axis=0), np.mean(np.abs(sources), axis=0)
        rounded = (len(sources) + 1) * _MEAN_ROUNDOFF * size + stored * np.abs(want)
        bound = rounded + 1.01 * largest_loss(want, codec, stored)
        off = np.abs(got - want)
        if not (off <= bound).all():
            at = np.unravel_index((off - bound).argmax(), off.shape)
            yield _Off(layer, where, name, float(got[at]), float(want[at]), float(bound[at]))
