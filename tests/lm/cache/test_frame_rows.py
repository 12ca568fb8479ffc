"""A stream's cache answers the calls of every other cache, or says what to use instead."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from scope_contracts.cache_spec import CacheChoice
from scope_contracts.errors import CacheError, UnsupportedError
from scope_rt.kv_cache.factory import open_frame_cache
from scope_rt.kv_cache.slot_cache import SlotCache
from scope_rt.lm.cache.interface import KVCache
from tests.lm.cache.frame_rows import FrameRows
from tests.tiny_models import CPU, cache_spec

KINDS = ["ring", "paged", "quantized:int8", "h2o"]
WINDOW = 8


def opened(kind: str) -> FrameRows:
    """A frame of one token, so that rows are tokens."""
    choice = CacheChoice.named(kind)
    spec = replace(
        cache_spec(sink=1, window=WINDOW),
        frame_tokens=1,
        batch=2,
        kind=choice.kind,
        codec=choice.codec,
    )
    frames = open_frame_cache(spec, device=CPU)
    assert isinstance(frames, SlotCache)
    return FrameRows(frames)


def planes(start: int, count: int) -> tuple[Tensor, Tensor]:
    """Rows that name their position and sequence."""
    k = torch.arange(start, start + count, dtype=torch.float64)[None, :, None, None]
    k = (k + torch.tensor([0.0, 0.5])[:, None, None, None]).expand(2, count, 4, 16)
    return k, -k


def decode(cache: KVCache, start: int, count: int) -> None:
    cache.extend([count, count])
    for layer in range(3):
        cache.append(layer, *planes(start, count))
    cache.advance()


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_shown_is_the_row_of_the_position_it_is_said_to_have(kind: str) -> None:
    cache = opened(kind)
    for step in range(7):
        decode(cache, 3 * step, 3)
        positions = cache.positions(1)
        assert positions.shape[0] == 2
        assert {0, 3 * step + 2} <= set(positions[0].tolist()), "the sink, or the newest, is gone"
        for shown, sign in zip(cache.view(1), (1, -1), strict=True):
            want = sign * (positions + torch.tensor([[0.0], [0.5]]))
            assert (shown[..., 0, 0] - want).abs().max() <= 0.1
    assert cache.lengths == (21, 21)


@pytest.mark.parametrize("kind", KINDS)
def test_the_open_span_is_shown_exact_and_its_digest_counts_after_advance(kind: str) -> None:
    cache = opened(kind)
    decode(cache, 0, 3)
    before = cache.digest()
    cache.extend([3, 3])
    k, v = planes(3, 3)
    cache.append(0, k, v)
    new = cache.positions(0)[0] >= 3
    assert torch.equal(cache.view(0)[0][:, new], k)
    assert cache.digest() == before
    with pytest.raises(CacheError, match=r"layers \[1, 2\] got no rows"):
        cache.advance()


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (lambda cache: cache.fork(), "contiguous or paged"),
        (lambda cache: cache.keep(0, torch.zeros(2, 1)), "use h2o or ring"),
        (lambda cache: cache.truncate([1, 1]), "contiguous or paged"),
        (lambda cache: cache.extend([1, 2]), "contiguous"),
    ],
)
def test_calls_that_only_the_adapter_has_are_refused_and_change_nothing(
    call: Callable[[FrameRows], None], remedy: str
) -> None:
    cache = opened("ring")
    decode(cache, 0, 3)
    before = cache.digest()
    with pytest.raises(UnsupportedError, match=remedy):
        call(cache)
    assert cache.digest() == before
    assert cache.lengths == (3, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_that_was_emptied_is_as_new(kind: str) -> None:
    cache, fresh = opened(kind), opened(kind)
    for step in range(5):
        decode(cache, 3 * step, 3)
    cache.truncate([0, 0])
    for one in (cache, fresh):
        decode(one, 0, 3)
    assert cache.digest() == fresh.digest()
    assert cache.num_bytes == fresh.num_bytes == cache.frames.spec.num_bytes(1)
