"""The ring's arithmetic is host integers, and no write goes where it should not."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scope_contracts.errors import CacheError, UserInputError
from scope_rt.collectives import SoloCollectives
from scope_rt.kv_cache.factory import open_frame_cache, slots_for
from scope_rt.kv_cache.frame_cache import WriteWindow
from scope_rt.kv_cache.ring import NewestFrames, plan_write, slot_of_frame
from scope_rt.kv_cache.slot_cache import InPlace, SlotCache
from tests.tiny_models import CONFIG, CPU, cache_spec

OTHERS = [layer for layer in range(CONFIG.num_layers) if layer != 1]
rings = st.tuples(st.integers(0, 4), st.integers(3, 12))


def ring(*, sink: int, window: int) -> SlotCache:
    spec = cache_spec(sink=sink, window=window)
    rows = slots_for(spec, tp_degree=1, device=CPU)
    return SlotCache(spec, policy=NewestFrames(spec), storage=InPlace(rows))


def memory(cache: SlotCache) -> tuple[Tensor, Tensor]:
    """Keys and values as they lie: `[num_layers, batch, capacity_tokens, heads, head_dim]`."""
    (keys,), (values,) = cache.storage.rows.parts
    return keys, values


def write_zeros(cache: SlotCache, planned: WriteWindow) -> None:
    k = torch.zeros(1, planned.num_tokens, 4, 16, dtype=torch.float64)
    for layer in range(cache.spec.num_layers):
        cache.update(layer, planned, k, k)


def frames_shown(sink: int, window: int, end: int) -> set[int]:
    """What a shift-based reference keeps: the sinks, then the newest frames."""
    return set(range(min(sink, end))) | set(range(max(sink, end - window), end))


@settings(deadline=None)
@given(rings, st.integers(1, 3), st.integers(0, 200))
def test_view_is_the_sinks_and_the_newest_window(
    sizes: tuple[int, int], block: int, chunk: int
) -> None:
    sink, window = sizes
    spec = cache_spec(sink=sink, window=window)
    planned = plan_write(spec, start_frame=chunk * block, num_frames=block)
    end = (chunk + 1) * block
    assert set(planned.frames_in_view) == frames_shown(sink, window, end)
    assert [slot_of_frame(spec, f) for f in planned.frames_in_view] == list(
        range(len(planned.frames_in_view))
    )
    assert planned.indices.global_end_index == end * spec.frame_tokens
    assert planned.indices.local_end_index <= spec.capacity_tokens


@settings(deadline=None)
@given(rings, st.integers(1, 3), st.integers(1, 30))
def test_what_is_read_is_what_was_written_last(
    sizes: tuple[int, int], block: int, num_chunks: int
) -> None:
    sink, window = sizes
    cache = ring(sink=sink, window=window)
    tokens, heads, dim = cache.spec.frame_tokens, cache.spec.num_heads, cache.spec.head_dim
    for chunk in range(num_chunks):
        planned = cache.window(start_frame=chunk * block, num_frames=block)
        frame = torch.arange(chunk * block, (chunk + 1) * block, dtype=torch.float64)
        k = frame.repeat_interleave(tokens)[None, :, None, None].expand(1, -1, heads, dim)
        for other in OTHERS:
            cache.update(other, planned, torch.zeros_like(k), torch.zeros_like(k))
        cache.update(1, planned, k, -k)
        shown_k, shown_v = cache.update(1, planned, k, -k)
        assert shown_k[0, ::tokens, 0, 0].tolist() == list(planned.frames_in_view)
        assert torch.equal(shown_v, -shown_k)
        cache.advance(planned)
        for other in OTHERS:
            assert not memory(cache)[0][other].any(), "another layer was written"


def test_eviction_moves_no_byte() -> None:
    cache = ring(sink=1, window=6)
    for chunk in range(9):
        planned = cache.window(start_frame=3 * chunk, num_frames=3)
        before = memory(cache)[0].clone()
        k = torch.randn(1, 3 * cache.spec.frame_tokens, 4, 16, dtype=torch.float64)
        for layer in range(CONFIG.num_layers):
            cache.update(layer, planned, k, k)
        changed = (before != memory(cache)[0]).any(-1).any(-1)[:, 0]
        assert changed.sum(1).tolist() == [k.shape[1]] * CONFIG.num_layers
        cache.advance(planned)


def test_storage_is_allocated_once() -> None:
    cache = ring(sink=0, window=6)
    addresses = [part.data_ptr() for part in memory(cache)]
    for chunk in range(20):
        planned = cache.window(start_frame=3 * chunk, num_frames=3)
        write_zeros(cache, planned)
        cache.advance(planned)
    assert addresses == [part.data_ptr() for part in memory(cache)]
    assert cache.num_bytes == cache.spec.num_bytes(1)


def test_a_chunk_larger_than_the_window_is_refused() -> None:
    with pytest.raises(CacheError, match="enlarge the window"):
        plan_write(cache_spec(sink=0, window=2), start_frame=0, num_frames=3)


def test_a_gap_is_refused() -> None:
    cache = ring(sink=0, window=6)
    with pytest.raises(CacheError, match="starts at frame 3, cache ends at token 0"):
        cache.window(start_frame=3, num_frames=3)


def test_a_write_of_another_length_touches_nothing() -> None:
    cache = ring(sink=0, window=6)
    planned = cache.window(start_frame=0, num_frames=3)
    k = torch.ones(1, 5, 4, 16, dtype=torch.float64)
    with pytest.raises(CacheError, match="K/V of 5 tokens"):
        cache.update(0, planned, k, k)
    assert not memory(cache)[0].any()


def test_reset_forgets() -> None:
    cache = ring(sink=0, window=6)
    planned = cache.window(start_frame=0, num_frames=3)
    write_zeros(cache, planned)
    cache.advance(planned)
    cache.reset()
    assert cache.window(start_frame=0, num_frames=3).frames_in_view == (0, 1, 2)


class OfThree(SoloCollectives):
    size = 3


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UserInputError, match="divisor of the model's 4 heads"):
        open_frame_cache(cache_spec(sink=0, window=6), device=CPU, group=OfThree())
