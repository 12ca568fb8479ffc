import pytest
import torch
from torch import Tensor

from scope_contracts.errors import CacheError, UnsupportedError
from scope_contracts.row_format import CodecKind
from scope_rt.lm.cache.interface import KVCache
from scope_rt.lm.hierarchical.cache import HierarchicalCache
from scope_rt.lm.hierarchical.hierarchy import Hierarchy, Span
from tests.lm.hierarchical.dense import CONFIG, small_cache

HIERARCHY = Hierarchy(group=2, windows=(4, 2, None))


def rows(count: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, 1, count, CONFIG.num_heads, CONFIG.head_dim)
    k, v = torch.randn(shape, generator=generator, dtype=torch.float64)
    return k, v


def grow(cache: HierarchicalCache, num_leaves: int, *, seed: int = 0) -> None:
    cache.extend([num_leaves])
    count = sum(map(len, cache.hierarchy.nodes(cache.span)))
    for layer in range(CONFIG.num_layers):
        cache.append(layer, *rows(count, seed=seed + layer))
    cache.advance()


def test_it_answers_the_calls_of_every_cache() -> None:
    cache: KVCache = small_cache(HIERARCHY)
    assert cache.lengths == (0,)
    assert cache.format.bytes_per_row == 2 * 2 * 4 * 8


def test_bytes_are_those_of_all_levels() -> None:
    cache = small_cache(HIERARCHY, max_leaves=20)
    assert cache.num_bytes == (20 + 10 + 5) * cache.format.bytes_per_row * CONFIG.num_layers


def test_a_view_shows_levels_one_behind_the_other() -> None:
    cache = small_cache(HIERARCHY)
    cache.extend([4])
    k, v = rows(4 + 2 + 1)
    cache.append(0, k, v)
    shown = cache.view(0)
    assert torch.equal(shown[0], k)
    assert torch.equal(shown[1], v)
    assert cache.positions(0).tolist() == [[0, 1, 2, 3, 1, 3, 3]]
    assert cache.positions(1).tolist() == [[]]  # nothing is there yet
    cache.append(1, k, v)
    cache.advance()
    grow(cache, 8)
    # leaf 12 is next: it sees leaves 10.., and before them LOD1 from a multiple of 2 on, LOD2
    assert cache.positions(0).tolist() == [[10, 11, 9, 3, 7]]
    assert (cache.counters.rows_read, cache.counters.gathers) == (7, 1)


def test_writing_a_span_again_overwrites_it() -> None:
    once, twice = small_cache(HIERARCHY), small_cache(HIERARCHY)
    grow(once, 5)
    twice.extend([3])
    twice.append(0, *rows(4, seed=9))
    twice.extend([5])
    for seed in (7, 0):
        for layer in range(CONFIG.num_layers):
            twice.append(layer, *rows(5 + 2 + 1, seed=seed + layer))
    twice.advance()
    assert once.digest() == twice.digest()
    assert twice.counters.rows_written == 4 + 2 * 2 * 8


def test_truncating_keeps_the_groups_that_are_still_full() -> None:
    cache, short = small_cache(HIERARCHY), small_cache(HIERARCHY)
    grow(cache, 6)
    grow(cache, 5, seed=3)
    cache.truncate([6])
    grow(short, 6)
    assert cache.digest() == short.digest()
    cache.truncate([5])
    assert cache.hierarchy.counts(cache.num_leaves) == (5, 2, 1)


def test_a_discard_brings_back_what_was_truncated_and_overwritten() -> None:
    cache = small_cache(HIERARCHY)
    grow(cache, 9)
    before = cache.digest()
    cache.fork()
    cache.truncate([7])
    grow(cache, 4, seed=11)
    cache.truncate([3])
    grow(cache, 9, seed=12)
    cache.extend([2])
    cache.discard()
    assert cache.digest() == before
    assert cache.lengths == (9,)
    grow(cache, 1)
    assert cache.lengths == (10,)


def test_committed_rows_stay() -> None:
    cache, straight = small_cache(HIERARCHY), small_cache(HIERARCHY)
    for made in (cache, straight):
        grow(made, 4)
        if made is cache:
            made.fork()
        grow(made, 3, seed=5)
    cache.commit()
    assert cache.digest() == straight.digest()


def test_rows_restore_only_where_they_were() -> None:
    cache = small_cache(HIERARCHY)
    grow(cache, 8)
    before = cache.digest()
    saved = cache.save(Span(start=4, end=8))
    assert saved.num_bytes == (4 + 2 + 1) * cache.format.bytes_per_row * CONFIG.num_layers
    cache.truncate([3])
    with pytest.raises(CacheError, match="rows from leaf 4 on, want 3, where the cache ends"):
        cache.restore(saved)
    cache.reset()
    grow(cache, 8)
    cache.truncate([4])
    cache.restore(saved)
    assert cache.digest() == before
    assert cache.counters.prefix_hits == 4
    with pytest.raises(CacheError, match="rows from leaf 4 on, want 8, where the cache ends"):
        cache.restore(saved)
    assert cache.counters.prefix_hits == 4


def test_restored_rows_replace_what_is_there_of_their_span_and_a_discard_brings_it_back() -> None:
    cache = small_cache(HIERARCHY)
    grow(cache, 8)
    saved, whole = cache.save(Span(start=4, end=8)), cache.digest()
    cache.truncate([4])
    grow(cache, 2, seed=3)
    half = cache.digest()
    cache.fork()
    cache.restore(saved)
    assert cache.digest() == whole
    assert cache.counters.prefix_hits == 2  # leaves 6 and 7: it lacked no more
    cache.discard()
    assert (cache.lengths, cache.digest()) == ((6,), half)


def test_rows_may_be_quantized() -> None:
    cache = small_cache(HIERARCHY, codec=CodecKind.INT8)
    cache.extend([4])
    k, v = rows(7)
    cache.append(0, k, v)
    shown = cache.view(0)[0]
    assert 0 < float((shown - k).abs().max()) < float(k.abs().max()) / 127
    assert cache.num_bytes < small_cache(HIERARCHY).num_bytes / 4


def test_bad_calls_are_refused_and_change_nothing() -> None:
    cache = small_cache(HIERARCHY, max_leaves=6)
    grow(cache, 5)
    before = cache.digest()
    with pytest.raises(CacheError, match="5 leaves and 2 new ones do not fit 6; raise max_leaves"):
        cache.extend([2])
    with pytest.raises(CacheError, match="want one count"):
        cache.extend([1, 1])
    with pytest.raises(CacheError, match="no span is open; call extend first"):
        cache.append(0, *rows(1))
    with pytest.raises(CacheError, match="no span is open; call extend first"):
        cache.advance()
    for ending in (cache.commit, cache.discard):
        with pytest.raises(CacheError, match="no speculative span is open; fork first"):
            ending()
    with pytest.raises(CacheError, match="want one of at most"):
        cache.truncate([6])
    with pytest.raises(UnsupportedError, match="smaller windows, collapse leaves, or truncate"):
        cache.keep(0, torch.zeros(1, 1))
    cache.extend([1])
    with pytest.raises(CacheError, match=r"the open span has \[1, 1, 0\] nodes by level"):
        cache.append(0, *rows(1))
    with pytest.raises(CacheError, match=r"layers \[0, 1\] got no rows"):
        cache.advance()
    with pytest.raises(CacheError, match="a span is open; advance first"):
        cache.truncate([2])
    assert cache.digest() == before
    cache.reset()
    cache.fork()
    with pytest.raises(CacheError, match="commit or discard it first"):
        cache.fork()
