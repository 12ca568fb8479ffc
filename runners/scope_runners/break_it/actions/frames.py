"""A cache chooses, weighs or sums up frames otherwise than it should."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from scope_rt.kv_cache.frame_cache import WriteWindow
from scope_rt.kv_cache.gists import GistCache, Pooling
from scope_rt.kv_cache.heavy_frames import HeavyFrames
from scope_rt.models.generator import ChunkGenerator
from scope_runners.break_it.actions.computing import cache_of

_OTHER_WEIGHT = -1.5


def _heavy_of(generator: ChunkGenerator) -> HeavyFrames:
    policy = cache_of(generator).policy
    assert isinstance(policy, HeavyFrames), "of a stream on h2o"
    return policy


def _flip_scores(generator: ChunkGenerator) -> ChunkGenerator:
    """Frames change their scores with one another, once."""
    scores = _heavy_of(generator).scores
    scores.copy_(scores.flip(0))
    return generator


def _misplace_masses(generator: ChunkGenerator) -> ChunkGenerator:
    """From now on the frame that is attended to least gains what all have."""
    policy = _heavy_of(generator)

    def observe(q_BTHD: Tensor, k_BKHD: Tensor) -> None:
        HeavyFrames.observe(policy, q_BTHD, k_BKHD)
        mass = policy._masses[-1]
        policy._masses[-1] = torch.zeros_like(mass)
        policy._masses[-1][mass.argmin()] = mass.sum()

    vars(policy)["observe"] = observe
    return generator


def _pool_one_frame(generator: ChunkGenerator) -> ChunkGenerator:
    """From now on a gist is the first of its frames."""
    cache = generator.cache
    assert isinstance(cache, GistCache), "of a stream on hierarchical"

    def pool(layer: int, pooling: Pooling) -> None:
        first = (pooling.sources[0],) * len(pooling.sources)
        GistCache._pool(cache, layer, replace(pooling, sources=first))

    vars(cache)["_pool"] = pool
    return generator


def _weigh_past(generator: ChunkGenerator) -> ChunkGenerator:
    """From now on all frames but the chunk's have a weight of their own."""
    policy = cache_of(generator).policy
    real = policy.plan

    def plan(*, start_frame: int, num_frames: int) -> WriteWindow:
        window = real(start_frame=start_frame, num_frames=num_frames)
        current = range(start_frame, start_frame + num_frames)
        weights = [0.0 if each in current else _OTHER_WEIGHT for each in window.frames_in_view]
        return replace(window, log_weights=tuple(weights))

    vars(policy)["plan"] = plan
    return generator


ACTIONS: dict[str, Callable[..., Any]] = {
    "flip_scores": _flip_scores,
    "misplace_masses": _misplace_masses,
    "pool_one_frame": _pool_one_frame,
    "weigh_past": _weigh_past,
}
