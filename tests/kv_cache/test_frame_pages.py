"""Frames in pages are the ring's frames, wherever the pages of a shared pool lie."""

import pytest
import torch
from torch import Tensor

from scope_contracts.cache_spec import CacheChoice, CacheKind
from scope_contracts.errors import CacheError
from scope_rt.kv_cache.factory import slots_for
from scope_rt.kv_cache.frame_pages import PagedFrames, PagePool
from scope_rt.kv_cache.ring import NewestFrames
from scope_rt.kv_cache.row_store import RowStore
from scope_rt.kv_cache.slot_cache import SlotCache
from tests.lm.cache.stream_caches import opened, run_chunk, spec_of
from tests.tiny_models import BLOCK, CPU, Rollout


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
