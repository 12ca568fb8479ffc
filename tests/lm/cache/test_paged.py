"""Paged == contiguous, row for row, and no sequence can touch or see another's rows."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scope_contracts.errors import CacheError, UnsupportedError, UserInputError
from scope_contracts.row_format import CodecKind, RowFormat
from scope_contracts.tensor_spec import DType
from scope_rt.lm.cache.contiguous import ContiguousCache
from scope_rt.lm.cache.interface import KVCache
from scope_rt.lm.cache.paged import PagedCache
from scope_rt.lm.cache.paged_store import num_blocks_in
from tests.lm.cache.paged_rows import (
    FORMAT,
    LAYERS,
    empty,
    feed,
    planes,
    store,
)
from tests.tiny_models import CPU


def assert_same(paged: PagedCache, other: KVCache) -> None:
    assert paged.lengths == other.lengths
    for layer in LAYERS.attention_layers:
        positions = paged.positions(layer)
        assert torch.equal(positions, other.positions(layer))
        for mine, theirs in zip(paged.view(layer), other.view(layer), strict=True):
            assert torch.equal(mine[positions >= 0], theirs[positions >= 0])
            assert not mine[positions < 0].any(), "what stands for no row is zero"
    assert paged.digest() == other.digest()


def act(cache: KVCache, action: str, counts: list[int], lengths: list[int], seed: int) -> None:
    match action:
        case "feed":
            feed(cache, counts, seed)
        case "feed twice":
            cache.extend([4, 0, 2])
            cache.append(0, *planes(3, 4, 999))
            feed(cache, counts, seed)
        case "truncate":
            cache.truncate(lengths)
        case "fork":
            cache.fork()
        case "commit":
            cache.commit()
        case "discard":
            cache.discard()
        case "reset":
            cache.reset()


@settings(max_examples=15, deadline=None)
@given(st.sampled_from([1, 3, 4]), st.randoms(use_true_random=False))
def test_paged_equals_contiguous_after_any_order_of_calls(
    block_size: int, rng: random.Random
) -> None:
    paged = empty(store(num_blocks=240, block_size=block_size), batch=3)
    contiguous = ContiguousCache(FORMAT, layers=LAYERS, batch=3, max_tokens=80, device=CPU)
    forked = False
    for seed in range(12):
        always = ("feed", "feed", "feed twice", "truncate", "reset")
        action = rng.choice((*always, *(("commit", "discard") if forked else ("fork",))))
        counts = [rng.randint(0, 4) for _ in range(3)]
        lengths = [rng.randint(max(0, length - 5), length) for length in paged.lengths]
        for cache in (paged, contiguous):
            act(cache, action, counts, lengths, seed)
        forked = action == "fork" or (forked and action not in ("commit", "discard", "reset"))
        assert_same(paged, contiguous)
    paged.reset()
    assert paged.store.pool.num_free == paged.store.pool.num_blocks, "a block was lost"


@pytest.mark.parametrize("codec", [CodecKind.IDENTITY, CodecKind.INT8])
def test_a_codec_stores_the_same_in_blocks(codec: CodecKind) -> None:
    row_format = RowFormat.full(heads=2, head_dim=4, value_dim=3, dtype=DType.FLOAT32, codec=codec)
    paged = empty(store(row_format=row_format), batch=2)
    contiguous = ContiguousCache(row_format, layers=LAYERS, batch=2, max_tokens=9, device=CPU)
    for cache in (paged, contiguous):
        feed(cache, [5, 2], 0)
        feed(cache, [3, 1], 1)
    assert_same(paged, contiguous)


def test_a_latent_cache_is_refused_by_a_codec_before_memory_is_taken() -> None:
    latent = RowFormat.latent(rank=16, rope_dim=8, dtype=DType.FLOAT32)
    with pytest.raises(UserInputError, match="keep latent caches at codec identity"):
        RowFormat(planes=latent.planes, dtype=latent.dtype, codec=CodecKind.INT8)


def test_the_pool_is_one_allocation_of_all_blocks_and_a_zero_block() -> None:
    of = store(num_blocks=7, block_size=4)
    k = of.rows.parts[0][0]
    assert k.shape == (2, 1, 8 * 4, 2, 4)  # layers, 1, (blocks and the zero block) * rows, H, D
    before = k.data_ptr()
    cache = empty(of, batch=2)
    feed(cache, [9, 9], 0)
    assert of.rows.parts[0][0].data_ptr() == before
    assert cache.num_bytes == 8 * 4 * 2 * FORMAT.bytes_per_row


def test_an_overflow_raises_before_anything_is_touched() -> None:
    cache = empty(store(num_blocks=4), batch=2)
    feed(cache, [7, 4], 0)
    pool, digest, tables = cache.store.pool, cache.digest(), cache.block_table()
    counters = (pool.num_free, pool.counters.allocations, pool.counters.frees)
    with pytest.raises(CacheError, match="no room for 2 more blocks: 1 of 4 are free"):
        cache.extend([2, 1])
    assert (pool.num_free, pool.counters.allocations, pool.counters.frees) == counters
    assert cache.digest() == digest
    assert torch.equal(cache.block_table(), tables)
    feed(cache, [1, 4], 1)


def test_nothing_of_another_sequence_shows_even_where_rows_are_padding() -> None:
    of = store(num_blocks=4)
    poisoned = empty(of)
    poisoned.extend([16])
    for layer in LAYERS.attention_layers:
        poisoned.append(layer, *(torch.full_like(x, torch.nan) for x in planes(1, 16, 0)))
    poisoned.advance()
    poisoned.reset()
    cache = empty(of, batch=2)
    feed(cache, [6, 1], 0)
    for plane in cache.view(0):
        assert plane.isfinite().all()


def test_counters_are_exact() -> None:
    cache = empty(store(), batch=2)
    feed(cache, [5, 2], 0)
    cache.view(0)
    cache.view(2)
    counted = cache.counters
    assert (counted.rows_written, counted.rows_read, counted.advances) == (14, 14, 1)
    pool = cache.store.pool.counters
    assert (pool.allocations, pool.frees, pool.hits, pool.evictions) == (3, 0, 0, 0)


def test_a_block_cannot_lose_the_rows_of_one_layer() -> None:
    cache = empty(store())
    feed(cache, [5], 0)
    with pytest.raises(UnsupportedError, match="use a contiguous cache"):
        cache.keep(0, torch.zeros(1, 1, dtype=torch.int64))


@pytest.mark.parametrize("block_size", [0, -4])
def test_a_block_of_no_tokens_is_refused(block_size: int) -> None:
    with pytest.raises(UserInputError, match="block size"):
        store(block_size=block_size)


def test_a_byte_budget_buys_whole_blocks_and_one_for_zeros() -> None:
    block = 4 * FORMAT.bytes_per_row * 2

    def num_blocks(budget: int) -> int:
        return num_blocks_in(budget, FORMAT, windows=[None, None], block_size=4)

    assert num_blocks(10 * block + 5) == 9
    assert store(num_blocks=9).rows.num_bytes == 10 * block
    with pytest.raises(UserInputError, match="cache budget bytes"):
        num_blocks(2 * block - 1)


def test_a_batch_of_nothing_or_of_one_sequence_twice_is_refused() -> None:
    of = store()
    sequence = of.start()
    for sequences in ([], [sequence, sequence]):
        with pytest.raises(CacheError, match="at least 1, and each once"):
            PagedCache(of, sequences)
