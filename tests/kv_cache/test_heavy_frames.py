"""Frames stay by the attention that they drew, summed once a chunk, and ranks agree on them."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from scope_contracts.cache_spec import CacheChoice
from scope_contracts.errors import UserInputError
from scope_rt.attention import mass
from scope_rt.collectives import Collectives, SoloCollectives
from scope_rt.kv_cache.factory import slots_for
from scope_rt.kv_cache.frame_cache import WriteWindow
from scope_rt.kv_cache.heavy_frames import HeavyFrames
from scope_rt.kv_cache.slot_cache import InPlace, SlotCache
from tests.lm.cache.stream_caches import DIM, HEADS, opened, rows, run_chunk, spec_of
from tests.rounding import attention_bound, gamma
from tests.thread_ranks import on_all_ranks, thread_ranks
from tests.tiny_models import BLOCK, CONFIG, CPU, Rollout

pytestmark = pytest.mark.numeric


def mass_bound(q: Tensor, k: Tensor, want: Tensor, *, group_tokens: int) -> Tensor:
    """Mass is what attention makes of values that say which group their key is in, summed up."""
    groups = torch.eye(len(want)).repeat_interleave(group_tokens, 0)[None, :, None]
    probabilities = attention_bound(q, k, groups.expand(*k.shape[:3], -1)).sum((0, 1, 2))
    return probabilities + gamma(q[..., 0].numel(), torch.float32) * want


@pytest.mark.parametrize("workspace_bytes", [mass.WORKSPACE_BYTES, 1])
def test_attention_mass_is_the_sum_of_the_probabilities(
    monkeypatch: pytest.MonkeyPatch, workspace_bytes: int
) -> None:
    monkeypatch.setattr(mass, "WORKSPACE_BYTES", workspace_bytes)
    q, k = torch.randn(2, 5, 3, 8), torch.randn(2, 12, 3, 8)
    scores = torch.einsum("bthd,bkhd->bhtk", q.double(), k.double()) / 8**0.5
    want = scores.softmax(-1).unflatten(-1, (3, 4)).sum((0, 1, 2, 4))
    got = mass.mass_of_groups(q, k, group_tokens=4)
    allowed = mass_bound(q, k, want, group_tokens=4)
    assert ((got.double() - want).abs() <= allowed).all()
    assert abs(got.double().sum() - 2 * 5 * 3) <= allowed.sum()


def test_scores_are_the_mass_of_a_dense_sum_over_chunks_layers_heads_and_queries() -> None:
    cache = opened(spec_of("h2o", sink=1, window=9))
    policy, tokens = cache.policy, cache.spec.frame_tokens
    assert isinstance(policy, HeavyFrames)
    want: dict[int, float] = {}
    allowed: dict[int, float] = {}
    for chunk in range(8):
        window = cache.window(start_frame=BLOCK * chunk, num_frames=BLOCK)
        for sums in (want, allowed):
            sums |= dict.fromkeys(range(BLOCK * chunk, BLOCK * (chunk + 1)), 0.0)
        for layer in range(cache.spec.num_layers):
            q, k = (2 * rows(cache.spec, 1000 * a + 10 * chunk + layer) for a in (1, 2))
            shown, _ = cache.update(layer, window, k, k)
            cache.observe(layer, window, q, shown)
            q, shown = q.float(), shown.float()  # in which it is scored
            scores = torch.einsum("bthd,bkhd->bhtk", q.double(), shown.double()) / DIM**0.5
            mass = scores.softmax(-1).unflatten(-1, (-1, tokens)).sum((0, 1, 2, 4))
            rounding = mass_bound(q, shown, mass, group_tokens=tokens)
            for sums, parts in ((want, mass), (allowed, rounding)):
                for frame, part in zip(window.frames_in_view, parts.tolist(), strict=True):
                    sums[frame] += part
        cache.advance(window)
        want = {frame: want[frame] for frame in cache.frames_kept}
        got = policy.scores[list(policy.slots_kept)].tolist()
        adding = gamma(cache.spec.num_layers * (chunk + 1), torch.float32)
        for frame, score in zip(cache.frames_kept, got, strict=True):
            assert abs(score - want[frame]) <= allowed[frame] + adding * want[frame]
    assert cache.counters.rows_evicted > 0


def test_the_digest_tells_caches_apart_that_will_evict_other_frames() -> None:
    first, second = (opened(spec_of("h2o", sink=0, window=9)) for _ in range(2))
    for cache in (first, second):
        for chunk in range(3):
            run_chunk(cache, chunk)
    assert first.digest() == second.digest()
    assert isinstance(second.policy, HeavyFrames)
    second.policy.scores[0] += 1
    assert first.scores_digest != second.scores_digest
    assert first.digest() != second.digest()
    assert first.frames_kept == second.frames_kept


def planted(hitter: int) -> Callable[[int], Tensor]:
    """Keys in one direction; only those of chunk `hitter` are long, so all queries go there."""

    def keys(chunk: int) -> Tensor:
        one = torch.ones(1, BLOCK * 4, HEADS, DIM, dtype=torch.float64)
        return one * (2.0 if chunk == hitter else 0.5)

    return keys


def test_a_heavy_frame_stays_where_the_ring_loses_it() -> None:
    kept = {}
    for kind in ("h2o", "ring"):
        cache = opened(spec_of(kind, sink=0, window=9))
        for chunk in range(8):
            run_chunk(cache, chunk, planted(hitter=1))
        kept[kind] = set(cache.window(start_frame=8 * BLOCK, num_frames=BLOCK).frames_in_view)
    heavy = {3, 4, 5}
    assert heavy <= kept["h2o"]
    assert not heavy & kept["ring"]
    assert len(kept["h2o"]) == len(kept["ring"])
    assert {21, 22, 23} <= kept["h2o"], "recent frames were displaced"


def test_of_equal_scores_the_older_frame_stays() -> None:
    cache = opened(spec_of("h2o", sink=0, window=9))
    for chunk in range(4):
        window = cache.window(start_frame=BLOCK * chunk, num_frames=BLOCK)
        for layer in range(cache.spec.num_layers):  # and nobody says what it attended to
            cache.update(layer, window, rows(cache.spec, chunk), rows(cache.spec, chunk))
        cache.advance(window)
    assert sorted(cache.frames_kept) == [0, 1, 2, 9, 10, 11]


def frames_of_ranks(groups: Sequence[Collectives], heads: Sequence[slice]) -> list[tuple[int, ...]]:
    """The frames each rank keeps, given its heads of the same keys."""

    def run(index: int) -> tuple[int, ...]:
        spec = spec_of("h2o", sink=0, window=9)
        policy = HeavyFrames(spec, groups[index])
        share = slots_for(spec, tp_degree=HEADS // len(range(HEADS)[heads[index]]), device=CPU)
        cache = SlotCache(spec, policy=policy, storage=InPlace(share))
        for chunk in range(6):
            run_chunk(cache, chunk, lambda n: rows(spec, n)[:, :, heads[index]] * 3)
        return tuple(sorted(cache.frames_kept))

    return on_all_ranks(len(groups), run)


def test_ranks_keep_the_same_frames_only_because_they_sum_scores_first() -> None:
    halves = [slice(0, HEADS // 2), slice(HEADS // 2, HEADS)]
    groups = thread_ranks(2)
    together = frames_of_ranks(groups, halves)
    apart = frames_of_ranks([SoloCollectives(), SoloCollectives()], halves)
    (alone,) = frames_of_ranks([SoloCollectives()], [slice(None)])
    assert together == [alone, alone]
    assert apart[0] != apart[1], "these heads would not have disagreed"
    spec = spec_of("h2o")
    assert [group.num_sums for group in groups] == [6 * spec.collectives_per_chunk] * 2


def test_a_rebuilt_cache_has_no_scores() -> None:
    cache = opened(spec_of("h2o", sink=0, window=9))
    for chunk in range(4):
        run_chunk(cache, chunk)
    assert isinstance(cache.policy, HeavyFrames)
    assert cache.policy.scores.any()
    cache.reset()
    assert not cache.policy.scores.any()
    fresh = opened(cache.spec)
    for one in (cache, fresh):
        for chunk in range(5):
            run_chunk(one, chunk)
    assert cache.digest() == fresh.digest()
    assert cache.frames_kept == fresh.frames_kept


@pytest.mark.parametrize(("window", "want"), [(4, "at least 5"), (256, "at most 256")])
def test_heavy_hitters_need_a_window_with_room_that_ranks_can_compare(
    window: int, want: str
) -> None:
    with pytest.raises(UserInputError, match=f"window_frames of h2o: got {window}, want {want}"):
        spec_of("h2o", window=window)


def counted_scores(rollout: Rollout, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers whose queries the policy was shown, in turn."""
    cache, shown = rollout.generator.cache, list[int]()
    observe = cache.observe

    def observe_and_count(layer: int, window: WriteWindow, q: Tensor, k: Tensor) -> None:
        shown.append(layer)
        observe(layer, window, q, k)

    monkeypatch.setattr(cache, "observe", observe_and_count)
    return shown


def test_a_chunk_is_scored_once_a_layer_by_its_clean_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = Rollout(sink=1, window=9, cache=CacheChoice.named("h2o"))
    shown = counted_scores(rollout, monkeypatch)
    rollout.run(range(3))
    assert shown == 3 * list(range(CONFIG.num_layers))
