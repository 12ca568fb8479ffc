"""A kernel reads blocks where they lie if it can, and finds by table the rows of a view."""

import pytest
import torch

from scope_contracts.errors import UnsupportedError, UserInputError
from scope_contracts.row_format import CodecKind, RowFormat
from scope_contracts.tensor_spec import DType
from scope_rt.lm.cache.backend_policy import DeviceTraits, choose_lane
from scope_rt.lm.cache.page_support import DENSE, FLASH_2, FLASH_3, PageSupport
from scope_rt.lm.cache.paged import PagedCache
from scope_rt.lm.cache.paged_store import PagedStore
from tests.lm.cache.paged_rows import FORMAT, LAYERS, attend_by_table, empty, feed, store
from tests.tiny_models import CPU


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


def test_a_store_reads_pages_as_the_lane_of_its_device_does() -> None:
    made = PagedStore(FORMAT, layers=LAYERS, num_blocks=1, block_size=4, device=CPU)
    assert made.page_support is choose_lane(DeviceTraits.of(CPU), FORMAT).lane.pages
