"""Whatever happens to rows that were written, every kind of cache names the layer and the frame."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from scope_rt.kv_cache.factory import open_frame_cache
from scope_rt.kv_cache.row_store import RowStore
from scope_rt.kv_cache.slot_cache import SlotCache
from tests.lm.cache.stream_caches import DIM, HEADS, KINDS, run_chunk, spec_of
from tests.tiny_models import BLOCK, CPU

LAYER, SLOT, BATCH = 1, 2, 2
KINDS_AND_GISTS = [*KINDS, "hierarchical", "hierarchical:int4"]


def watched(kind: str, dtype: torch.dtype = torch.float64) -> SlotCache:
    """A cache of two batch rows that holds two chunks."""
    spec = replace(spec_of(kind), batch=BATCH)
    cache = open_frame_cache(spec, device=CPU, finds_damage=True)
    assert isinstance(cache, SlotCache)
    for chunk in range(2):
        write(cache, chunk)
    assert cache.damaged(range(spec.num_layers)) == []
    return cache


def write(cache: SlotCache, chunk: int) -> None:
    shape = (BATCH, BLOCK * cache.spec.frame_tokens, HEADS, DIM)
    drawn = torch.Generator().manual_seed(chunk)
    run_chunk(cache, chunk, lambda _: torch.randn(shape, generator=drawn, dtype=torch.float64))


def frame(cache: SlotCache, part: Tensor, slot: int = SLOT) -> Tensor:
    """One batch row's tokens of a frame slot, as bytes `[tokens, bytes]`."""
    tokens = cache.spec.frame_tokens
    at = slice(slot * tokens, (slot + 1) * tokens)
    return part[LAYER, BATCH - 1, at].view(torch.uint8).flatten(1)


def flip_a_bit(cache: SlotCache, part: Tensor) -> None:
    frame(cache, part)[-1, -1] ^= 1


def swap_rows(cache: SlotCache, part: Tensor) -> None:
    rows = frame(cache, part)
    rows[[0, 1]] = rows[[1, 0]]


def swap_frames(cache: SlotCache, part: Tensor) -> None:
    one, other = frame(cache, part), frame(cache, part, SLOT + 1)
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def flip_two_signs(cache: SlotCache, part: Tensor) -> None:
    """What keeps every sum of words whose weights differ by an even number."""
    frame(cache, part)[:2, -1] ^= 0x80


def swap_batch_rows(cache: SlotCache, part: Tensor) -> None:
    part[LAYER] = part[LAYER].flip(0)


@pytest.mark.parametrize("kind", KINDS_AND_GISTS)
@pytest.mark.parametrize(
    "change",
    [flip_a_bit, swap_rows, swap_frames, flip_two_signs, swap_batch_rows],
    ids=lambda change: change.__name__,
)
@pytest.mark.parametrize("part", ["first", "last"])
def test_a_change_of_any_part_is_found_in_its_layer_and_frame(
    kind: str, change: Callable[[SlotCache, Tensor], None], part: str
) -> None:
    cache = watched(kind)
    parts = [each for plane in cache.storage.rows.parts for each in plane]
    change(cache, parts[0] if part == "first" else parts[-1])
    found = cache.damaged(range(cache.spec.num_layers))
    assert (LAYER, cache.frames_by_slot[SLOT]) in found
    assert {layer for layer, _ in found} == {LAYER}
    if change is not swap_batch_rows:
        assert len(found) == 1 + (change is swap_frames)


@pytest.mark.parametrize("kind", KINDS_AND_GISTS)
def test_a_tensor_that_was_replaced_counts_as_changed(kind: str) -> None:
    cache = watched(kind)
    rows = cache.storage.rows
    rows.parts = tuple(tuple(part.clone() for part in plane) for plane in rows.parts)
    assert cache.damaged(range(cache.spec.num_layers)) == [], "the same numbers lie elsewhere"
    flip_a_bit(cache, rows.parts[0][0])
    assert cache.damaged(range(cache.spec.num_layers)) == [(LAYER, cache.frames_by_slot[SLOT])]


@pytest.mark.parametrize("kind", KINDS_AND_GISTS)
@pytest.mark.parametrize("goes", ["nowhere", "elsewhere"])
def test_a_write_that_is_skipped_or_goes_elsewhere_is_found(
    kind: str, goes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, store = watched(kind), RowStore.write

    def misplaced(rows: RowStore, layer: int, slots: Any, planes: Any) -> Any:
        if layer != LAYER:
            return store(rows, layer, slots, planes)
        if goes == "elsewhere":
            return store(rows, layer + 1, slots, planes)
        kept = [[part.clone() for part in plane] for plane in rows.parts]
        given = store(rows, layer, slots, planes)
        for plane, before in zip(rows.parts, kept, strict=True):
            for part, old in zip(plane, before, strict=True):
                part.copy_(old)
        return given

    monkeypatch.setattr(RowStore, "write", misplaced)
    write(cache, 2)
    found = {layer for layer, _ in cache.damaged(range(cache.spec.num_layers))}
    assert LAYER in found


@pytest.mark.parametrize("kind", KINDS_AND_GISTS)
def test_what_is_about_to_be_overwritten_is_looked_at_before(kind: str) -> None:
    cache = watched(kind)
    for part in (part for plane in cache.storage.rows.parts for part in plane):
        part[LAYER].view(torch.uint8).bitwise_xor_(1)
    cache.reset()
    assert {layer for layer, _ in cache.damaged(range(0))} == {LAYER}
