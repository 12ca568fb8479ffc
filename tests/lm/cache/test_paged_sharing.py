"""A block that others hold or may find is never written again, nor given away."""

import pytest
import torch

from scope_contracts.errors import CacheError
from scope_rt.lm.cache.page_support import FLASH_3
from scope_rt.lm.cache.paged import PagedCache
from scope_rt.lm.cache.paged_store import PagedStore
from tests.lm.cache.paged_rows import LAYERS, SCOPE, attend_by_table, empty, feed, publish, store


def test_a_speculative_span_writes_no_block_that_was_there_before() -> None:
    cache = empty(store(page_support=FLASH_3))
    feed(cache, [6], 0)
    before, digest = cache.block_table().tolist(), cache.digest()
    held = [rows.clone() for rows in attend_by_table(cache, 0)]
    cache.fork()
    feed(cache, [7], 1)
    assert cache.block_table().tolist()[0][0] == before[0][0], "full blocks are shared"
    assert cache.block_table().tolist()[0][1] != before[0][1], "the open one was copied"
    cache.discard()
    assert cache.block_table().tolist() == before
    assert cache.digest() == digest
    assert torch.equal(attend_by_table(cache, 0)[0], held[0])


def test_a_span_that_is_committed_is_what_straight_decoding_would_have_left() -> None:
    speculated, straight = empty(store()), empty(store())
    feed(straight, [6], 0)
    feed(straight, [3], 1)
    feed(speculated, [6], 0)
    speculated.fork()
    feed(speculated, [3], 1)
    speculated.commit()
    assert speculated.digest() == straight.digest()
    assert speculated.store.pool.num_free == straight.store.pool.num_free


def test_rows_that_others_may_find_are_never_written_again() -> None:
    of = store()
    cache = empty(of)
    feed(cache, [8], 0)
    keys = of.keys(range(8), SCOPE)
    of.publish(cache.sequences[0], keys)
    (published,) = attend_by_table(empty_view(of, cache), 0)
    kept = published.clone()
    cache.truncate([6])
    feed(cache, [2], 1)
    found = of.prefixes.match(keys, 9)
    reader = PagedCache(of, [of.start(found)])
    assert torch.equal(reader.view(0)[0][0], kept)
    assert not torch.equal(cache.view(0)[0][0], kept)


def empty_view(of: PagedStore, cache: PagedCache) -> PagedCache:
    """The same sequences, read as by a kernel that takes block tables."""
    of.page_support = FLASH_3
    return cache


def test_a_shared_prefix_is_held_once_and_outlives_the_one_who_computed_it() -> None:
    of = store(num_blocks=5)
    first = empty(of)
    feed(first, [9], 0)
    keys = of.keys(range(9), SCOPE)
    of.publish(first.sequences[0], keys)
    digest_rows = first.view(0)[0][:, :8].clone()
    second = PagedCache(of, [of.start(of.prefixes.match(keys, 9))])
    assert second.lengths == (8,)
    assert of.counters.prefix_hits == 8
    assert of.pool.num_free == 2, "3 blocks of the first, none more for the second"
    first.reset()
    assert torch.equal(second.view(0)[0], digest_rows)
    assert of.pool.num_free == 3


def test_a_match_whose_blocks_were_given_to_others_holds_nothing() -> None:
    of = store(num_blocks=4)
    first, other = empty(of), empty(of)
    feed(first, [8], 0)
    publish(of, first, range(8))
    first.reset()
    stale = of.prefixes.match(of.keys(range(9), SCOPE), 9)
    feed(other, [16], 1)
    publish(of, other, range(100, 116))
    other.reset()
    before = (of.pool.num_free, of.pool.counters.hits, of.counters.prefix_hits)
    with pytest.raises(CacheError, match="no longer holds the prefix that was matched"):
        of.start(stale)
    assert (of.pool.num_free, of.pool.counters.hits, of.counters.prefix_hits) == before


def test_what_is_written_after_a_truncation_can_be_found_and_what_was_there_before_too() -> None:
    of = store()
    cache = empty(of)
    feed(cache, [8], 0)
    publish(of, cache, range(8))
    cache.truncate([4])
    feed(cache, [4], 1)
    changed = [*range(4), *range(50, 54)]
    publish(of, cache, changed)
    for tokens, is_new in ((changed, True), (range(8), False)):
        reader = PagedCache(of, [of.start(of.prefixes.match(of.keys(tokens, SCOPE), 9))])
        assert reader.lengths == (8,)
        assert torch.equal(reader.view(0)[0], cache.view(0)[0]) is is_new


@pytest.mark.parametrize("windows", [None, [3, 3], [None, 6]])
def test_a_fork_holds_no_block_that_a_failed_span_left(windows: list[int | None] | None) -> None:
    of = store(windows=windows)
    sequence = of.start()
    first = PagedCache(of, [sequence])
    feed(first, [4], 0)
    first.extend([4])  # and its forward fails
    cache = PagedCache(of, [sequence])
    cache.fork()
    feed(cache, [4], 1)
    publish(of, cache, range(8))
    reader = PagedCache(of, [of.start(of.prefixes.match(of.keys(range(9), SCOPE), 9))])
    assert reader.lengths == (8,)
    rows = [reader.view(layer)[0][:, -4:].clone() for layer in LAYERS.attention_layers]
    reader.reset()
    cache.discard()
    feed(cache, [4], 2)
    found = PagedCache(of, [of.start(of.prefixes.match(of.keys(range(9), SCOPE), 9))])
    assert found.lengths == (8,)
    for layer, before in zip(LAYERS.attention_layers, rows, strict=True):
        assert torch.equal(found.view(layer)[0][:, -4:], before)
    for made in (cache, found):
        made.reset()
    assert of.pool.num_free == of.pool.num_blocks


def test_blocks_that_a_fork_still_holds_make_no_room_when_they_leave_the_window() -> None:
    cache = empty(store(num_blocks=3, windows=[4, 4]))
    feed(cache, [8], 0)
    cache.fork()
    pool, before = cache.store.pool, cache.block_table().tolist()
    with pytest.raises(CacheError, match="no room for 2 more blocks: 1 of 3 are free"):
        cache.extend([8])
    assert cache.block_table().tolist() == before
    assert [pool.references(block) for block in range(3)] == [2, 2, 0]
