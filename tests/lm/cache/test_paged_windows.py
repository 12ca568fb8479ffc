"""Layers with a window give blocks back as these leave it, and lose nothing that they see."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scope_contracts.errors import CacheError, UserInputError
from scope_contracts.row_format import RowFormat
from scope_contracts.tensor_spec import DType
from scope_rt.lm.cache.block_key import SharingScope
from scope_rt.lm.cache.layer_map import AttnLayerMap
from scope_rt.lm.cache.paged import PagedCache
from scope_rt.lm.cache.paged_store import PagedStore
from scope_rt.lm.specs.layer_groups import layer_groups
from tests.tiny_models import CPU

SIZE = 4
FORMAT = RowFormat.full(heads=1, head_dim=1, dtype=DType.FLOAT64)


def paged(windows: list[int | None], *, num_blocks: int = 60, batch: int = 1) -> PagedCache:
    return PagedCache.allocate(
        FORMAT,
        layers=AttnLayerMap.all_of(len(windows)),
        batch=batch,
        num_blocks=num_blocks,
        block_size=SIZE,
        device=CPU,
        windows=windows,
    )


def feed(cache: PagedCache, *num_tokens: int) -> None:
    """Every row holds its own position."""
    cache.extend(num_tokens)
    starts = torch.tensor(cache.lengths)[:, None]
    row = (starts + torch.arange(max(num_tokens)))[:, :, None, None].double()
    for layer in cache.store.layers.attention_layers:
        cache.append(layer, row, -row)
    cache.advance()


def shown(cache: PagedCache, layer: int, sequence: int = 0) -> list[int]:
    """Positions that the layer shows, once their rows were found to be theirs."""
    positions = cache.positions(layer)[sequence]
    real = positions >= 0
    k, v = cache.view(layer)
    assert torch.equal(k[sequence, real, 0, 0], positions[real].double())
    assert torch.equal(v[sequence, real, 0, 0], -positions[real].double())
    return sorted(positions[real].tolist())


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 14), st.lists(st.integers(1, 6), min_size=1, max_size=12))
def test_every_position_in_the_window_of_a_new_token_is_there(
    window: int, spans: list[int]
) -> None:
    cache = paged([None, window])
    for span in spans:
        start = cache.lengths[0]
        feed(cache, span)
        end = start + span
        assert shown(cache, 0) == list(range(end))
        assert set(range(max(0, start - window + 1), end)) <= set(shown(cache, 1))


def test_blocks_that_left_the_window_are_free_again() -> None:
    cache = paged([6], num_blocks=4)
    for _ in range(50):
        feed(cache, 1)
    assert cache.lengths == (50,)
    assert cache.store.pool.num_free >= 1
    assert cache.counters.rows_evicted == 44  # positions 0..43: the query at 49 sees 44..49
    assert shown(cache, 0) == list(range(44, 50))


def test_a_prefix_behind_the_window_is_reused_though_its_beginning_is_gone() -> None:
    cache, scope = paged([6]), SharingScope(domain="cpp")
    store = cache.store
    keys = store.keys(range(24), scope)
    for _ in range(6):
        feed(cache, 4)
        store.publish(cache.sequences[0], keys)
    reader = PagedCache(store, [store.start(store.prefixes.match(keys, 25))])
    assert reader.lengths == (24,)
    assert shown(reader, 0) == list(range(16, 24))
    feed(reader, 3)
    assert set(range(19, 27)) <= set(shown(reader, 0))


def test_layers_are_grouped_by_window_in_equal_sizes() -> None:
    groups = layer_groups([4, 4, None, 4, 4, None])
    assert [(group.window, group.slots) for group in groups] == [
        (4, (0, 1)),
        (4, (3, 4)),
        (None, (2, 5)),
    ]


def test_groups_share_one_pool_and_windows_save_blocks_in_it() -> None:
    mixed, full = paged([3, 3, 3, None]), paged([None] * 4)
    for cache in (mixed, full):
        for _ in range(10):
            feed(cache, 4)
    used = [cache.store.pool.num_blocks - cache.store.pool.num_free for cache in (mixed, full)]
    assert used == [10 + 3 * 2, 10]  # in blocks of one layer and of four
    assert mixed.store.rows.num_layers == 1


def test_a_sequence_grows_into_the_blocks_that_another_leaves_in_the_same_span() -> None:
    cache = paged([4], num_blocks=3, batch=2)
    feed(cache, 4, 8)
    assert cache.store.pool.num_free == 0
    feed(cache, 4, 0)
    assert shown(cache, 0) == list(range(8))
    assert shown(cache, 0, sequence=1) == list(range(4, 8))


def test_a_discarded_span_gives_back_what_left_the_window_meanwhile() -> None:
    cache = paged([6])
    feed(cache, 11)
    before, digest = shown(cache, 0), cache.digest()
    cache.fork()
    for _ in range(5):
        feed(cache, 4)
    cache.discard()
    assert (shown(cache, 0), cache.digest()) == (before, digest)
    cache.reset()
    assert cache.store.pool.num_free == cache.store.pool.num_blocks


def test_going_back_to_where_the_window_is_gone_is_refused_before_anything_is_touched() -> None:
    cache = paged([6])
    for _ in range(6):
        feed(cache, 4)
    digest = cache.digest()
    with pytest.raises(CacheError, match="fork before speculating"):
        cache.truncate([12])
    assert (cache.lengths, cache.digest()) == ((24,), digest)
    cache.truncate([23])
    feed(cache, 1)
    assert set(range(18, 24)) <= set(shown(cache, 0))


@pytest.mark.parametrize("windows", [[0], [-1, None]])
def test_a_window_that_shows_nothing_is_refused(windows: list[int | None]) -> None:
    with pytest.raises(UserInputError, match="windows"):
        paged(windows)


def test_one_window_is_wanted_for_each_layer() -> None:
    with pytest.raises(UserInputError, match="one for each of 2 attention layers"):
        PagedStore(
            FORMAT,
            layers=AttnLayerMap.all_of(2),
            num_blocks=2,
            block_size=SIZE,
            device=CPU,
            windows=[None],
        )
