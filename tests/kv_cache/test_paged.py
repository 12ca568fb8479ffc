"""Paged == contiguous, row for row, and no sequence can touch or see another's rows."""

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scope_contracts.errors import CacheError, UnsupportedError, UserInputError
from scope_contracts.row_format import CodecKind, RowFormat
from scope_contracts.tensor_spec import DType
from scope_rt.kv_cache.backend_policy import DeviceTraits, choose_lane
from scope_rt.kv_cache.block_key import Attachment, SharingScope
from scope_rt.kv_cache.contiguous import ContiguousCache
from scope_rt.kv_cache.interface import KVCache
from scope_rt.kv_cache.layer_map import AttnLayerMap
from scope_rt.kv_cache.page_support import DENSE, FLASH_2, FLASH_3, PageSupport
from scope_rt.kv_cache.paged import PagedCache
from scope_rt.kv_cache.paged_store import PagedStore, num_blocks_in
from tests.tiny_models import CPU

FORMAT = RowFormat.full(heads=2, head_dim=4, value_dim=3, dtype=DType.FLOAT32)
LAYERS = AttnLayerMap(num_layers=3, attention_layers=(0, 2))
SCOPE = SharingScope(domain="cpp")


def store(
    *,
    num_blocks: int = 32,
    block_size: int = 4,
    row_format: RowFormat = FORMAT,
    windows: Sequence[int | None] | None = None,
    page_support: PageSupport = DENSE,
    in_place_only: bool = False,
) -> PagedStore:
    return PagedStore(
        row_format,
        layers=LAYERS,
        num_blocks=num_blocks,
        block_size=block_size,
        device=CPU,
        windows=windows,
        page_support=page_support,
        in_place_only=in_place_only,
    )


def empty(of: PagedStore, batch: int = 1) -> PagedCache:
    return PagedCache(of, [of.start() for _ in range(batch)])


def planes(batch: int, num_tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(batch, num_tokens, 2, 4, generator=generator)
    v = torch.randn(batch, num_tokens, 2, 3, generator=generator)
    return k, v


def feed(cache: KVCache, num_tokens: Sequence[int], seed: int) -> None:
    cache.extend(num_tokens)
    for layer in LAYERS.attention_layers:
        cache.append(layer, *planes(len(num_tokens), max(num_tokens), 10 * seed + layer))
    cache.advance()


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


def test_adjacent_blocks_of_one_sequence_are_read_without_a_copy() -> None:
    cache = empty(store())
    feed(cache, [10], 0)
    k, v = cache.view(2)
    assert cache.counters.gathers == 0
    pool_k, pool_v = (parts[0] for parts in cache.store.rows.parts)
    assert k.data_ptr() == pool_k[1].data_ptr()
    assert v.data_ptr() == pool_v[1].data_ptr()


def test_scattered_blocks_and_batches_are_gathered_and_counted() -> None:
    of = store()
    first, second = empty(of), empty(of)
    for seed in range(2):
        feed(first, [4], seed)
        feed(second, [4], seed)
    first.view(0)
    first.view(2)
    assert of.counters.gathers == 2
    both = PagedCache(of, [*first.sequences, *second.sequences])
    both.view(0)
    assert of.counters.gathers == 3


@pytest.mark.parametrize(
    ("support", "block_size", "reads"),
    [
        (FLASH_2, 256, True),
        (FLASH_2, 512, True),
        (FLASH_2, 64, False),
        (FLASH_3, 16, True),
        (FLASH_3, 1, True),
        (DENSE, 256, False),
    ],
)
def test_the_multiple_of_256_is_flash_attention_2s_alone(
    support: PageSupport, block_size: int, reads: bool
) -> None:
    assert support.reads(block_size) is reads
    if reads:
        store(block_size=block_size, num_blocks=1, page_support=support, in_place_only=True)
        return
    with pytest.raises(UserInputError, match="allow gathering"):
        store(block_size=block_size, page_support=support, in_place_only=True)
    with pytest.raises(UserInputError, match="allow gathering"):
        empty(store(block_size=block_size, num_blocks=1, page_support=support)).pages(0)


def attend_by_table(cache: PagedCache, layer: int) -> list[Tensor]:
    """What a kernel with a block table reads, sequence by sequence."""
    pages = cache.pages(layer)
    plane = pages.planes[0]
    return [
        plane[table.long()].flatten(0, 1)[: int(length)]
        for table, length in zip(pages.block_table, pages.cache_seqlens, strict=True)
    ]


def test_a_block_table_names_the_rows_that_a_view_gathers() -> None:
    cache = empty(store(page_support=FLASH_3), batch=3)
    feed(cache, [5, 1, 0], 0)
    feed(cache, [4, 2, 3], 1)
    pages, (k, _), real = cache.pages(2), cache.view(2), cache.positions(2) >= 0
    assert pages.block_table.dtype == pages.cache_seqlens.dtype == torch.int32
    assert pages.cache_seqlens.tolist() == list(cache.lengths)
    assert pages.planes[0].data_ptr() == cache.store.rows.parts[0][0][1].data_ptr(), "no copy"
    for sequence, rows in enumerate(attend_by_table(cache, 2)):
        assert torch.equal(rows, k[sequence, real[sequence]])


def test_encoded_rows_are_not_handed_to_a_kernel_that_reads_in_place() -> None:
    row_format = RowFormat.full(heads=2, head_dim=4, dtype=DType.FLOAT32, codec=CodecKind.INT8)
    cache = empty(store(row_format=row_format, page_support=FLASH_3))
    with pytest.raises(UnsupportedError, match="call view"):
        cache.pages(0)


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


def publish(of: PagedStore, cache: PagedCache, tokens: Sequence[int]) -> None:
    of.publish(cache.sequences[0], of.keys(tokens, SCOPE))


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


def test_a_batch_of_nothing_or_of_one_sequence_twice_is_refused() -> None:
    of = store()
    sequence = of.start()
    for sequences in ([], [sequence, sequence]):
        with pytest.raises(CacheError, match="at least 1, and each once"):
            PagedCache(of, sequences)


def test_a_store_tells_images_behind_equal_placeholders_apart() -> None:
    of = store()
    cat, dog = (
        of.keys([0] * 8, SCOPE, attachments=[Attachment(start=1, num_tokens=2, content=content)])
        for content in (b"cat", b"dog")
    )
    assert cat != dog
    assert cat != of.keys([0] * 8, SCOPE)


def test_a_store_reads_pages_as_the_lane_of_its_device_does() -> None:
    made = PagedStore(FORMAT, layers=LAYERS, num_blocks=1, block_size=4, device=CPU)
    assert made.page_support is choose_lane(DeviceTraits.of(CPU), FORMAT).lane.pages
