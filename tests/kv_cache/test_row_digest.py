"""Equal digests mean equal futures: what the next tokens meet counts, and nothing else does."""

import pytest
import torch

from scope_contracts.row_format import RowFormat
from scope_contracts.tensor_spec import DType
from scope_rt.lm.cache.contiguous import ContiguousCache
from scope_rt.lm.cache.interface import KVCache
from scope_rt.lm.cache.layer_map import AttnLayerMap
from scope_rt.lm.cache.paged import PagedCache

CPU = torch.device("cpu")
FORMAT = RowFormat.full(heads=1, head_dim=2, dtype=DType.FLOAT32)
LAYERS = AttnLayerMap.all_of(2)


def contiguous() -> ContiguousCache:
    return ContiguousCache(FORMAT, layers=LAYERS, batch=1, max_tokens=16, device=CPU)


def windowed() -> PagedCache:
    return PagedCache.allocate(
        FORMAT, layers=LAYERS, batch=1, num_blocks=32, block_size=4, device=CPU, windows=[6, None]
    )


def feed(cache: KVCache, *spans: int) -> None:
    """Tokens that tell where they stand."""
    for num_tokens in spans:
        start = cache.lengths[0]
        cache.extend([num_tokens])
        rows = torch.arange(start, start + num_tokens).float()[None, :, None, None]
        for layer in (0, 1):
            cache.append(layer, *[rows.expand(1, num_tokens, 1, 2)] * 2)
        cache.advance()


def test_equal_rows_of_sequences_of_unequal_length_are_told_apart() -> None:
    longer, shorter = contiguous(), contiguous()
    feed(longer, 5)
    for layer in (0, 1):
        longer.keep(layer, torch.tensor([[0, 1]]))
    feed(shorter, 2)
    for layer in (0, 1):
        assert torch.equal(longer.positions(layer), shorter.positions(layer))
    assert longer.digest() != shorter.digest()


@pytest.mark.parametrize("spans", [(10, 7), (1,) * 17, (16, 1)])
def test_rows_behind_the_window_do_not_count_however_they_were_fed(spans: tuple[int, ...]) -> None:
    at_once, in_pieces = windowed(), windowed()
    feed(at_once, 17)
    feed(in_pieces, *spans)
    assert in_pieces.digest() == at_once.digest()


@pytest.mark.parametrize("position", [11, 12, 16])
def test_every_row_that_the_next_query_can_see_counts(position: int) -> None:
    """A window of 6 shows position 17 what lies from 12 on."""
    cache = windowed()
    feed(cache, 17)
    digest = cache.digest()
    row = cache.positions(0)[0].tolist().index(position)
    cache.view(0)[0][0, row] += 1
    assert (cache.digest() != digest) == (position >= 12)
