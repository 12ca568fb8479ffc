"""A chunk becomes past once, and only with rows of its last call in every layer."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from scope_contracts.cache_spec import CacheChoice
from scope_contracts.errors import CacheError
from scope_rt.kv_cache.factory import open_frame_cache
from scope_rt.kv_cache.frame_cache import FrameCache, WriteWindow
from tests.tiny_models import BLOCK, CONFIG, CPU, cache_spec

LOSSY = ["quantized:int8", "h2o:int8"]
KINDS = ["ring", "paged", "h2o", "hierarchical", *LOSSY]
LAYERS = range(CONFIG.num_layers)


def opened(kind: str) -> FrameCache:
    choice = CacheChoice.named(kind)
    spec = replace(cache_spec(sink=1, window=9), kind=choice.kind, codec=choice.codec)
    return open_frame_cache(spec, device=CPU)


def rows(seed: int) -> Tensor:
    spec = cache_spec(sink=1, window=9)
    shape = (1, BLOCK * spec.frame_tokens, spec.num_heads, spec.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def planned(cache: FrameCache, chunk: int) -> WriteWindow:
    return cache.window(start_frame=BLOCK * chunk, num_frames=BLOCK)


def call(
    cache: FrameCache, window: WriteWindow, layers: Iterable[int] = LAYERS, *, is_last: bool = True
) -> None:
    """One generator call: every layer shows rows of its own."""
    for layer in layers:
        cache.update(layer, window, rows(layer), -rows(layer), is_last=is_last)


def with_one_chunk(kind: str) -> FrameCache:
    cache = opened(kind)
    window = planned(cache, 0)
    call(cache, window)
    cache.advance(window)
    return cache


def test_a_chunk_may_be_written_by_many_calls_and_becomes_past_once() -> None:
    cache = with_one_chunk("ring")
    window = planned(cache, 1)
    for _ in range(4):
        call(cache, window, is_last=False)
    call(cache, window)
    cache.advance(window)
    with pytest.raises(CacheError, match="no span is open; call window first"):
        cache.advance(window)
    assert cache.counters.advances == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("missed", LAYERS)
def test_a_chunk_that_a_layer_missed_does_not_become_past(kind: str, missed: int) -> None:
    cache, want = with_one_chunk(kind), with_one_chunk(kind)
    before, window = (cache.indices, cache.frames_kept, cache.digest()), planned(cache, 1)
    call(cache, window, [layer for layer in LAYERS if layer != missed])
    with pytest.raises(
        CacheError, match=rf"advance: layers \[{missed}\] got no rows of this chunk"
    ):
        cache.advance(window)
    assert (cache.indices, cache.frames_kept, cache.digest()) == before
    assert cache.counters.advances == 1
    call(cache, window, [missed])
    call(want, planned(want, 1))
    for each in (cache, want):
        each.advance(window)
    assert cache.digest() == want.digest()


@pytest.mark.parametrize("kind", LOSSY)
def test_a_chunk_whose_last_call_a_layer_missed_would_be_past_without_its_rows(kind: str) -> None:
    cache = with_one_chunk(kind)
    window = planned(cache, 1)
    call(cache, window, is_last=False)
    call(cache, window, LAYERS[:-1])
    with pytest.raises(CacheError, match=rf"layers \[{LAYERS[-1]}\].*last call to update"):
        cache.advance(window)


def test_rows_of_a_chunk_that_was_given_up_do_not_count_for_the_next() -> None:
    cache = with_one_chunk("ring")
    call(cache, planned(cache, 1))
    window = planned(cache, 1)
    with pytest.raises(CacheError, match=r"layers \[0, 1, 2\] got no rows"):
        cache.advance(window)


@pytest.mark.parametrize(
    "end",
    [lambda cache, window: cache.advance(window), lambda cache, window: cache.reset()],
    ids=["advance", "reset"],
)
def test_nothing_is_written_where_no_chunk_was_planned(
    end: Callable[[FrameCache, WriteWindow], None],
) -> None:
    cache = with_one_chunk("ring")
    window = planned(cache, 1)
    call(cache, window)
    end(cache, window)
    written = cache.counters.rows_written
    with pytest.raises(CacheError, match="no span is open; call window first"):
        call(cache, window)
    assert cache.counters.rows_written == written
