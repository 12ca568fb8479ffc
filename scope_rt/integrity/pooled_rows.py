"""A gist is the mean of the rows that it stands for: worked out again while those still lie there.

In `strict` all tokens in all layers; else some tokens of one layer of every gist, in turn on each
level. Nothing waits for a device before the chunk's end.
"""

from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor

from scope_contracts.integrity import suspect_from
from scope_rt.checks import Checks
from scope_rt.integrity.cached_rows import largest_loss
from scope_rt.kv_cache.gists import GistCache, Pooling
from scope_rt.models.generator import ChunkGenerator

_FEW_TOKENS = 16
"""Of a gist that are looked at in `default`."""
_MEAN_ROUNDOFF = 2.0**-24
"""Means are taken in float32."""


class _Look(NamedTuple):
    """At one plane of one gist in one layer."""

    level: int
    layer: int
    where: str
    name: str
    furthest: Tensor
    """The number that is furthest off, what it must be and its bound: `[3]`."""


class PooledRows:
    """One generator rank's; sees gists from when it is built."""

    def __init__(
        self, generator: ChunkGenerator, *, rank: int, checks: Checks, is_strict: bool
    ) -> None:
        self._rank, self._checks, self._is_strict = rank, checks, is_strict
        self._num_seen: dict[int, int] = defaultdict(int)
        """By level."""
        self._looks: list[_Look] = []
        self._right_until: dict[tuple[int, int], int] = {}
        """By level and layer: the last chunk in which one was looked at."""
        if isinstance(generator.cache, GistCache):
            generator.cache.see_pooled = self._see

    def end(self, chunk: int) -> None:
        """Compare what was seen since the last call; waits for the device.

        What is found speaks against all chunks since the same layer was looked at on that level:
        what sums up otherwise goes on to.

        Raises:
            IntegrityError: naming the first gist that is off.
        """
        looks, self._looks = self._looks, []
        if not looks:
            return
        numbers = torch.stack([look.furthest for look in looks]).tolist()
        for look, (got, want, bound) in zip(looks, numbers, strict=True):
            if not abs(got - want) <= bound:
                where = f"chunk {chunk}, rank {self._rank}, layer {look.layer}, {look.where}"
                since = self._right_until.get((look.level, look.layer), -1) + 1
                with suspect_from(chunk if self._is_strict else since):
                    self._checks.cached_rows(where, look.name, got, want, bound)
        self._right_until |= {(look.level, look.layer): chunk for look in looks}

    @torch.inference_mode()
    def _see(self, cache: GistCache, pooling: Pooling) -> None:
        spec = cache.spec
        level = (pooling.target - spec.sink_frames - spec.window_frames) // spec.gists.group
        rounds, turn = divmod(self._num_seen[level], spec.num_layers)
        self._num_seen[level] += 1
        layers, tokens = range(spec.num_layers), slice(0, spec.frame_tokens)
        if not self._is_strict:
            start = rounds * _FEW_TOKENS % spec.frame_tokens
            layers, tokens = range(turn, turn + 1), slice(start, start + _FEW_TOKENS)
        frame = cache.frames_by_slot[pooling.target]
        where, num_other = f"gist of frame {frame}", _num_other_sources(cache, pooling, frame)
        for layer in layers:
            if num_other:
                found = torch.tensor([num_other, 0.0, 0.0], device=cache.device)
                self._looks.append(_Look(level, layer, where, "sources of a gist", found))
            for name, furthest in _furthest(cache, pooling, layer, tokens):
                self._looks.append(_Look(level, layer, where, name, furthest))


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


def _furthest(
    cache: GistCache, pooling: Pooling, layer: int, tokens: slice
) -> list[tuple[str, Tensor]]:
    """Of keys and of values: `furthest` of `_Look`. Both means are taken in float32, in any
    order."""
    size = cache.spec.frame_tokens
    slots = [slice(at * size, (at + 1) * size) for at in (*pooling.sources, pooling.target)]
    rows = [cache.rows(layer, each) for each in slots]
    stored = torch.finfo(rows[0][0].dtype).eps / 2
    found = []
    for name, planes in zip(("keys", "values"), zip(*rows, strict=True), strict=True):
        *sources, got = (plane[:, tokens].float() for plane in planes)
        group = torch.stack(sources)
        want = group.mean(0)
        bound = 2 * (len(sources) + 1) * _MEAN_ROUNDOFF * group.abs().mean(0)
        bound += stored * want.abs() + 1.01 * largest_loss(want, cache.spec.codec, stored)
        at = ((got - want).abs() - bound).flatten().argmax(keepdim=True)
        numbers = [x.flatten().gather(0, at) for x in (got, want, bound)]
        found.append((name, torch.cat(numbers)))
    return found
