"""What a chunk sees and what stays is what sizes and attention say, or the chunk is refused."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from scope_contracts.cache_spec import CacheChoice, CacheKind
from scope_contracts.errors import IntegrityError
from scope_rt.control.chunk import Chunk
from scope_rt.faults import FaultPoint
from scope_rt.integrity.frame_reference import chosen_frames, frames_by_age
from scope_rt.kv_cache.policy import HeavyHitters
from scope_rt.models.generator import ChunkGenerator
from scope_runners.break_it.actions import ACTIONS
from tests.integrity.audited import disarmed
from tests.integrity.corruption import Change
from tests.integrity.rank0_streams import shown_with
from tests.tiny_models import Rollout, cache_spec

AT = 4


def less_budget(generator: ChunkGenerator) -> None:
    policy: Any = generator.cache.policy  # type: ignore[attr-defined]
    policy._choose = replace(policy._choose, budget=policy._choose.budget - 1)


def others_sum(generator: ChunkGenerator) -> None:
    """An all-reduce gives something else than the sum of what it was given."""
    policy: Any = generator.cache.policy  # type: ignore[attr-defined]
    group = policy._group

    class Other:
        size, rank = group.size, group.rank

        def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
            summed: torch.Tensor = group.all_reduce_sum(tensor)
            return summed * 1.001

    policy._group = Other()


CHANGES: list[tuple[str, Any, str]] = [
    ("h2o", ACTIONS["flip_scores"], "cached score of frame"),
    ("h2o", ACTIONS["misplace_masses"], "layer 0: cached attention to frame slot"),
    ("h2o", less_budget, "cached frames that stay"),
    ("h2o", others_sum, "attention to frames: sum of what came back"),
    ("hierarchical", ACTIONS["pool_one_frame"], "gist of frame .*: cached keys"),
    ("hierarchical:int8", ACTIONS["pool_one_frame"], "gist of frame .*: cached keys"),
    ("hierarchical", ACTIONS["weigh_past"], "cached frames in view that do not belong there"),
    ("ring", ACTIONS["weigh_past"], "cached frames in view that do not belong there"),
    ("paged", ACTIONS["weigh_past"], "cached frames in view that do not belong there"),
]


@pytest.mark.parametrize(("kv_cache", "change", "said"), CHANGES)
def test_strict_shows_no_chunk_of_frames_that_were_chosen_or_summed_up_otherwise(
    kv_cache: str, change: Callable[[ChunkGenerator], Any], said: str
) -> None:
    shown: list[Chunk] = []
    with pytest.raises(IntegrityError, match=f"chunk {AT}, rank 0.*{said}"):
        shown_with(
            Change(FaultPoint.GENERATOR, AT, change),
            shown=shown,
            integrity="strict",
            kv_cache=kv_cache,
        )
    assert len(shown) == AT


@pytest.mark.parametrize("change", [ACTIONS["flip_scores"], less_budget])
def test_default_verifies_every_choice(change: Callable[[ChunkGenerator], Any]) -> None:
    shown: list[Chunk] = []
    with pytest.raises(IntegrityError, match=f"chunk {AT}, rank 0: cached"):
        shown_with(Change(FaultPoint.GENERATOR, AT, change), shown=shown, kv_cache="h2o")
    assert len(shown) == AT


def test_default_looks_at_one_layer_of_every_gist() -> None:
    shown: list[Chunk] = []
    change = Change(FaultPoint.GENERATOR, AT, ACTIONS["pool_one_frame"])
    with pytest.raises(IntegrityError, match=f"chunk {AT}, rank 0, layer ., gist of") as raised:
        shown_with(change, shown=shown, kv_cache="hierarchical")
    assert raised.value.suspect_from is not None
    assert raised.value.suspect_from <= AT == len(shown)


def test_without_the_check_gists_of_one_frame_are_shown() -> None:
    change = Change(FaultPoint.GENERATOR, AT, ACTIONS["pool_one_frame"])
    checks = disarmed("cached_rows")
    assert len(shown_with(change, checks=checks, kv_cache="hierarchical")) > AT


@pytest.mark.parametrize("kind", [CacheKind.RING, CacheKind.HIERARCHICAL])
def test_the_reference_sees_what_a_policy_shows(kind: CacheKind) -> None:
    for sink, window in product((0, 1, 3), (5, 6, 7)):
        rollout = Rollout(sink=sink, window=window, cache=CacheChoice(kind=kind))
        cache, start = rollout.generator.cache, 0
        policy: Any = cache.policy  # type: ignore[attr-defined]
        size = cache.spec.block_frames
        for _ in range(40):
            shown = policy.plan(start_frame=start, num_frames=size)
            weights = shown.log_weights or [0.0] * len(shown.frames_in_view)
            got = sorted(zip(shown.frames_in_view, weights, strict=True))
            want = frames_by_age(cache.spec, start + size)
            assert [frame for frame, _ in got] == [frame for frame, _ in want]
            assert [each for _, each in got] == pytest.approx([each for _, each in want])
            policy.advance(shown)
            start += size
            if kind is CacheKind.HIERARCHICAL:
                policy.due(start)


def test_the_reference_keeps_what_heavy_hitters_keep() -> None:
    spec = replace(cache_spec(sink=1, window=6), kind=CacheKind.H2O)
    hitters = HeavyHitters(
        budget=spec.hitter_frames, num_sink=spec.sink_frames, num_recent=spec.recent_frames
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        num = int(torch.randint(1, spec.capacity_frames + 1, (), generator=generator))
        frames = torch.randperm(40, generator=generator)[:num]
        scores = torch.randint(3, (num,), generator=generator).double()  # many are equal
        kept = frames[hitters.kept(scores, frames)].tolist()
        assert chosen_frames(spec, frames.tolist(), scores.tolist()) == set(kept)
