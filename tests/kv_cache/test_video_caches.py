"""Whatever keeps a stream's past, the present is exact, the window is full, and ranks agree."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from scope_contracts.cache_spec import CacheChoice, CacheKind, KVCacheSpec
from scope_contracts.envelope import CONDITIONING_EMBEDS, CONTEXT_FRAMES_OVERRIDE, LATENTS_IN
from scope_contracts.errors import CacheError, UserInputError
from scope_rt.attention import mass
from scope_rt.collectives import Collectives, SoloCollectives
from scope_rt.kv_cache.frame_cache import WriteWindow
from scope_rt.kv_cache.frame_pages import PagedFrames, PagePool
from scope_rt.kv_cache.heavy_frames import HeavyFrames
from scope_rt.kv_cache.ring import NewestFrames
from scope_rt.kv_cache.row_store import RowStore
from scope_rt.kv_cache.slot_cache import InPlace, SlotCache
from scope_rt.kv_cache.video import open_frame_cache, slots_for
from scope_rt.mesh.budget import CallBudget
from tests.thread_ranks import on_all_ranks, thread_ranks
from tests.tiny_models import BLOCK, CONFIG, CPU, STEPS, Rollout, cache_spec, envelope

KINDS = ["ring", "paged", "quantized:int8", "quantized:int4", "quantized:fp8", "h2o", "h2o:int8"]
LOSSY = [kind for kind in KINDS if ":" in kind]
HEADS, DIM = CONFIG.num_attention_heads, CONFIG.attention_head_dim


def spec_of(kind: str, *, sink: int = 1, window: int = 8) -> KVCacheSpec:
    choice = CacheChoice.named(kind)
    return replace(cache_spec(sink=sink, window=window), kind=choice.kind, codec=choice.codec)


def opened(spec: KVCacheSpec, group: Collectives | None = None) -> SlotCache:
    cache = open_frame_cache(spec, device=CPU, group=group)
    assert isinstance(cache, SlotCache)
    return cache


def rows(spec: KVCacheSpec, seed: int) -> Tensor:
    shape = (1, BLOCK * spec.frame_tokens, HEADS, DIM)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run_chunk(cache: SlotCache, chunk: int, keys: Callable[[int], Tensor] | None = None) -> None:
    """One chunk whose queries are its keys."""
    window = cache.window(start_frame=BLOCK * chunk, num_frames=BLOCK)
    for layer in range(cache.spec.num_layers):
        k = rows(cache.spec, 10 * chunk + layer) if keys is None else keys(chunk)
        shown, _ = cache.update(layer, window, k, -k)
        if cache.spec.needs_attention_scores:
            cache.observe(layer, window, k, shown)
    cache.advance(window)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_what_the_spec_counts_on_any_number_of_ranks(kind: str) -> None:
    class OfTwo(SoloCollectives):
        size = 2

    spec = spec_of(kind)
    assert opened(spec).num_bytes == spec.num_bytes(1)
    assert opened(spec, OfTwo()).num_bytes == spec.num_bytes(2)
    assert spec.num_bytes(2) * 2 == spec.num_bytes(1)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_stands_where_the_spec_says_and_shows_as_many_frames(kind: str) -> None:
    cache = opened(spec_of(kind, sink=1, window=9))
    for chunk in range(7):
        window = cache.window(start_frame=BLOCK * chunk, num_frames=BLOCK)
        run_chunk(cache, chunk)
        assert cache.indices == cache.spec.indices_at(BLOCK * (chunk + 1))
        tokens = len(window.frames_in_view) * cache.spec.frame_tokens
        assert tokens == cache.indices.local_end_index
        assert set(range(BLOCK * chunk, BLOCK * (chunk + 1))) <= set(window.frames_in_view)
        assert 0 in window.frames_in_view, "the sink was evicted"
    layers, tokens = cache.spec.num_layers, cache.spec.frame_tokens
    gone = 7 * BLOCK - len(cache.frames_kept)
    assert cache.counters.rows_evicted == gone * tokens * layers
    assert cache.counters.rows_written == 7 * BLOCK * tokens * layers
    assert cache.counters.advances == 7


@pytest.mark.parametrize("kind", LOSSY)
def test_the_chunk_in_flight_sees_itself_exact_and_only_its_last_call_is_encoded(kind: str) -> None:
    cache = opened(spec_of(kind))
    run_chunk(cache, 0)
    before = [part.clone() for plane in cache.storage.rows.parts for part in plane]
    window = cache.window(start_frame=BLOCK, num_frames=BLOCK)
    k = rows(cache.spec, 1)
    shown_k, shown_v = cache.update(0, window, k, -k, is_last=False)
    own = slice(BLOCK * cache.spec.frame_tokens, None)
    assert torch.equal(shown_k[:, own], k)
    assert torch.equal(shown_v[:, own], -k)
    after = [part for plane in cache.storage.rows.parts for part in plane]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    again, _ = cache.update(0, window, k, -k)
    assert torch.equal(again, shown_k)
    cache.advance(window)
    kept, _ = cache.cached(0)
    assert not torch.equal(kept[:, own], k)
    assert (kept[:, own] - k).abs().max() <= 0.07 * k.abs().max()  # int4: a range over 30


def test_a_stream_in_pages_of_a_shared_pool_is_the_rings_stream_bit_for_bit() -> None:
    ring = Rollout(sink=1, window=6)
    spec = ring.generator.cache.spec
    rows = RowStore(
        spec.row_format,
        num_layers=spec.num_layers,
        batch=spec.batch,
        num_slots=2 * spec.capacity_tokens,
        device=CPU,
    )
    pool = PagePool(rows, page_tokens=2)
    pair = [Rollout(sink=1, window=6, cache=CacheChoice(kind=CacheKind.PAGED)) for _ in range(2)]
    caches = []
    for rollout in pair:
        storage = PagedFrames(pool, frame_tokens=spec.frame_tokens)
        caches.append(SlotCache(spec, policy=NewestFrames(spec), storage=storage))
        rollout.generator.cache = caches[-1]
    for chunk in range(5):
        want = ring.chunk(chunk)
        for rollout in pair:
            assert torch.equal(rollout.chunk(chunk), want)
    assert {cache.digest() for cache in caches} == {ring.generator.cache.digest()}
    assert all(cache.counters.gathers > 0 for cache in caches), "pages never lay apart"
    caches[0].reset()
    assert pool.blocks.num_free == pool.blocks.num_blocks // 2


def test_tokens_whose_pages_lie_apart_are_found_from_any_slot_on() -> None:
    spec = spec_of("paged")
    pool = PagePool(slots_for(spec, tp_degree=1, device=CPU), page_tokens=4)
    one, other = (PagedFrames(pool, frame_tokens=4) for _ in range(2))
    for frames, end in ((one, 8), (other, 4), (one, 12)):
        frames.open(slice(0, end))
    assert one.table[1] + 1 != one.table[2]
    want = [4 * page + token for page in one.table[1:] for token in range(4)]
    place = one.place(slice(4, 12))
    assert isinstance(place, Tensor)
    assert place.tolist() == want


def test_pages_of_a_stream_alone_lie_in_order_and_nothing_is_copied() -> None:
    cache = opened(spec_of("paged"))
    for _ in range(2):
        for chunk in range(4):
            run_chunk(cache, chunk)
        assert cache.counters.gathers == 0
        cache.reset()


def test_a_pool_without_room_refuses_the_chunk_before_it_begins() -> None:
    spec = spec_of("paged")
    pool = PagePool(slots_for(spec, tp_degree=1, device=CPU), page_tokens=spec.frame_tokens)
    first, second = (
        SlotCache(
            spec,
            policy=NewestFrames(spec),
            storage=PagedFrames(pool, frame_tokens=spec.frame_tokens),
        )
        for _ in range(2)
    )
    for chunk in range(3):
        run_chunk(first, chunk)
    digest = first.digest()
    with pytest.raises(CacheError, match="no room for 3 blocks"):
        second.window(start_frame=0, num_frames=BLOCK)
    assert second.frames_kept == ()
    assert first.digest() == digest


@pytest.mark.parametrize("page_tokens", [3, 8])
def test_a_page_that_two_frames_would_share_is_refused(page_tokens: int) -> None:
    spec = spec_of("paged", sink=0, window=6)
    pool = PagePool(slots_for(spec, tp_degree=1, device=CPU), page_tokens=page_tokens)
    with pytest.raises(CacheError, match="divisor of a frame's 4 tokens"):
        PagedFrames(pool, frame_tokens=spec.frame_tokens)


@pytest.mark.parametrize("workspace_bytes", [mass.WORKSPACE_BYTES, 1])
def test_attention_mass_is_the_sum_of_the_probabilities(
    monkeypatch: pytest.MonkeyPatch, workspace_bytes: int
) -> None:
    monkeypatch.setattr(mass, "WORKSPACE_BYTES", workspace_bytes)
    q, k = torch.randn(2, 5, 3, 8), torch.randn(2, 12, 3, 8)
    scores = torch.einsum("bthd,bkhd->bhtk", q.double(), k.double()) / 8**0.5
    want = scores.softmax(-1).unflatten(-1, (3, 4)).sum((0, 1, 2, 4))
    got = mass.mass_of_groups(q, k, group_tokens=4)
    assert torch.allclose(got.double(), want, atol=1e-5)
    assert abs(got.sum().item() - 2 * 5 * 3) < 1e-4


def test_scores_are_the_mass_of_a_dense_sum_over_chunks_layers_heads_and_queries() -> None:
    cache = opened(spec_of("h2o", sink=1, window=9))
    policy, tokens = cache.policy, cache.spec.frame_tokens
    assert isinstance(policy, HeavyFrames)
    want: dict[int, float] = {}
    for chunk in range(8):
        window = cache.window(start_frame=BLOCK * chunk, num_frames=BLOCK)
        want |= dict.fromkeys(range(BLOCK * chunk, BLOCK * (chunk + 1)), 0.0)
        for layer in range(cache.spec.num_layers):
            q, k = (2 * rows(cache.spec, 1000 * a + 10 * chunk + layer) for a in (1, 2))
            shown, _ = cache.update(layer, window, k, k)
            cache.observe(layer, window, q, shown)
            p = (torch.einsum("bthd,bkhd->bhtk", q, shown) / DIM**0.5).softmax(-1)
            mass = p.unflatten(-1, (-1, tokens)).sum((0, 1, 2, 4)).tolist()
            for frame, part in zip(window.frames_in_view, mass, strict=True):
                want[frame] += part
        cache.advance(window)
        want = {frame: want[frame] for frame in cache.frames_kept}
        got = policy.scores[list(policy.slots_kept)].tolist()
        assert got == pytest.approx([want[frame] for frame in cache.frames_kept], rel=1e-5)
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


def test_counters_count_every_row_of_the_batch() -> None:
    spec = replace(spec_of("ring", sink=1, window=6), batch=2)
    cache = opened(spec)
    for chunk in range(3):
        run_chunk(cache, chunk, lambda n: rows(spec, n).expand(2, -1, -1, -1))
    per_frame = 2 * spec.frame_tokens * spec.num_layers
    assert cache.counters.rows_written == 9 * per_frame
    assert cache.counters.rows_read == (3 + 6 + 7) * per_frame
    assert cache.counters.rows_evicted == 2 * per_frame


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


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_streams_on_every_kind_and_stays_close_to_the_ring(kind: str) -> None:
    ring, other = (Rollout(sink=1, window=9, cache=CacheChoice.named(k)) for k in ("ring", kind))
    for want, got in zip(ring.run(range(3)), other.run(range(3)), strict=True):
        assert torch.equal(got, want) or ":" in kind
        assert (got - want).abs().max() < 0.2


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


def test_only_the_last_call_of_a_chunk_is_encoded() -> None:
    rollout = Rollout(sink=1, window=9, cache=CacheChoice.named("quantized:int8"))
    rollout.run(range(3))
    spec, counters = rollout.generator.cache.spec, rollout.generator.cache.counters
    assert counters.rows_written == 3 * BLOCK * spec.frame_tokens * spec.num_layers


def test_without_a_clean_pass_the_last_denoising_step_is_encoded() -> None:
    """As a model streams that rebuilds its cache: here every other chunk."""
    made: dict[str, list[Tensor]] = {}
    for kind in ("ring", "quantized:int8"):
        rollout = Rollout(sink=0, window=9, cache=CacheChoice.named(kind))
        made[kind] = []
        for chunk in range(4):
            plan = replace(
                envelope(chunk, calls=len(STEPS) + chunk % 2),
                clean_pass=False,
                do_kv_recompute=chunk % 2 == 1,
            )
            tensors = {LATENTS_IN: rollout.noise(chunk), CONDITIONING_EMBEDS: rollout.text}
            if plan.do_kv_recompute:
                tensors[CONTEXT_FRAMES_OVERRIDE] = made[kind][-1]
            budget = CallBudget(chunk, plan.expected_generator_calls)
            made[kind].append(rollout.generator.generate(plan, tensors, budget.enter))
    spec, counters = rollout.generator.cache.spec, rollout.generator.cache.counters
    num_frames = 4 * BLOCK + 2 * BLOCK
    assert counters.rows_written == num_frames * spec.frame_tokens * spec.num_layers
    for want, got in zip(made["ring"], made["quantized:int8"], strict=True):
        assert (got - want).abs().max() < 0.2
