"""Rows are read where they lie, layers that do not attend cost nothing, and lengths move once."""

import pytest
import torch

from scope_contracts.errors import CacheError, UnsupportedError
from scope_contracts.row_format import CodecKind, RowFormat
from scope_contracts.tensor_spec import DType
from scope_rt.lm.cache.contiguous import ContiguousCache
from scope_rt.lm.cache.layer_map import AttnLayerMap
from tests.lm.cache.waits import Waits

FORMAT = RowFormat.full(heads=2, head_dim=4, dtype=DType.FLOAT32)
HYBRID = AttnLayerMap(num_layers=52, attention_layers=tuple(range(3, 52, 4)))
"""Every fourth layer attends; the others are Mamba layers."""


def cache(layers: AttnLayerMap | None = None, *, batch: int = 2) -> ContiguousCache:
    return ContiguousCache(
        FORMAT,
        layers=layers or AttnLayerMap.all_of(2),
        batch=batch,
        max_tokens=8,
        device=torch.device("cpu"),
    )


def step(made: ContiguousCache, counts: list[int]) -> None:
    made.extend(counts)
    for layer in made.layers.attention_layers:
        x = torch.randn(made.batch, max(counts), 2, 4)
        made.append(layer, x, -x)
    made.advance()


def test_13_attention_layers_of_52_take_13_slots_and_save_75_percent() -> None:
    made, all_layers = cache(HYBRID), cache(AttnLayerMap.all_of(52))
    assert made.store.parts[0][0].shape == (13, 2, 8, 2, 4)
    assert made.num_bytes / all_layers.num_bytes == 0.25


def test_a_layer_that_does_not_attend_has_no_slot_and_the_others_are_named() -> None:
    made = cache(HYBRID)
    step(made, [1, 1])
    made.extend([1, 1])
    for call in (
        made.view,
        made.positions,
        made.cache_seqlens,
        made.append,
        made.memory,
        made.wrote_in_place,
    ):
        with pytest.raises(CacheError, match=r"layer 4 has no keys and values; layers 3, 7, .* do"):
            call(4)


@pytest.mark.parametrize("layers", [(), (1, 1), (2, 1), (-1,), (52,)])
def test_a_layer_map_that_is_none_is_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(CacheError, match="ascending"):
        AttnLayerMap(num_layers=52, attention_layers=layers)


def test_a_view_is_the_memory_itself() -> None:
    made = cache()
    step(made, [3, 5])
    keys, values = made.view(1)
    (stored_keys,), (stored_values,) = made.store.parts
    assert keys.data_ptr() == stored_keys[1].data_ptr()
    assert values.data_ptr() == stored_values[1].data_ptr()
    assert keys.shape == (2, 5, 2, 4)
    assert made.counters.gathers == 0


def test_a_kernel_may_write_the_span_itself_and_does_not_count() -> None:
    appended, in_place = cache(), cache()
    for made in (appended, in_place):
        step(made, [2, 2])
        made.reset()
    x = torch.randn(2, 3, 2, 4)
    for made in (appended, in_place):
        made.extend([3, 3])
    for layer in (0, 1):
        appended.append(layer, x, -x)
        for plane, rows in zip(in_place.memory(layer), (x, -x), strict=True):
            assert plane.shape == (2, 8, 2, 4)
            plane[:, :3] = rows
        in_place.wrote_in_place(layer)
        assert in_place.cache_seqlens(layer).tolist() == [0, 0]
    appended.advance()
    in_place.advance()
    assert in_place.digest() == appended.digest()
    assert in_place.counters == appended.counters


def test_encoded_rows_have_no_memory_that_a_kernel_could_write() -> None:
    rows = RowFormat.full(heads=2, head_dim=4, dtype=DType.FLOAT32, codec=CodecKind.INT8)
    made = ContiguousCache(
        rows, layers=AttnLayerMap.all_of(1), batch=1, max_tokens=4, device=torch.device("cpu")
    )
    with pytest.raises(UnsupportedError, match="use append"):
        made.memory(0)


def test_memory_is_allocated_once() -> None:
    made = cache()
    address = made.store.parts[0][0].data_ptr(), made.cache_seqlens(0).data_ptr()
    for _ in range(3):
        step(made, [1, 2])
    made.truncate([0, 1])
    made.reset()
    assert address == (made.store.parts[0][0].data_ptr(), made.cache_seqlens(0).data_ptr())
    assert made.num_bytes == 2 * 2 * 8 * FORMAT.bytes_per_row


def test_cache_seqlens_move_once_after_the_last_layer() -> None:
    made = cache()
    step(made, [3, 1])
    made.extend([1, 2])
    x = torch.zeros(2, 2, 2, 4)
    for layer in (0, 1, 0):
        made.append(layer, x, x)
        assert [made.cache_seqlens(i).tolist() for i in (0, 1)] == [[3, 1], [3, 1]]
    made.advance()
    assert [made.cache_seqlens(i).tolist() for i in (0, 1)] == [[4, 3], [4, 3]]
    assert made.cache_seqlens(0).dtype is torch.int32


def test_a_span_that_a_layer_missed_does_not_advance() -> None:
    made = cache()
    made.extend([1, 1])
    x = torch.zeros(2, 1, 2, 4)
    made.append(0, x, x)
    with pytest.raises(CacheError, match=r"layers \[1\] got no rows"):
        made.advance()


def test_overflow_of_one_ragged_sequence_names_it() -> None:
    made = cache()
    step(made, [2, 7])
    with pytest.raises(CacheError, match="sequence 1: 7 rows and 2 new ones do not fit 8"):
        made.extend([1, 2])


def test_eviction_frees_room_and_positions_stay() -> None:
    made = cache()
    step(made, [8, 8])
    for layer in (0, 1):
        made.keep(layer, torch.tensor([[0, 6, 7], [1, 2, -1]]))
    assert made.cache_seqlens(0).tolist() == [3, 2]
    step(made, [1, 2])
    assert made.positions(0).tolist() == [[0, 6, 7, 8], [1, 2, 8, 9]]
    assert made.lengths == (9, 10)


def test_a_row_kept_twice_or_not_there_is_refused() -> None:
    made = cache()
    step(made, [3, 3])
    digest = made.digest()
    for rows in ([[0, 0], [0, 1]], [[0, 1], [2, 3]]):
        with pytest.raises(CacheError, match="want different ones below 3"):
            made.keep(0, torch.tensor(rows))
    for shape in ((1, 2), (2,), (3, 2)):
        with pytest.raises(CacheError, match=r"want \[2, K\]"):
            made.keep(0, torch.zeros(shape, dtype=torch.int64))
    with pytest.raises(CacheError, match="of integers"):
        made.keep(0, torch.zeros(2, 1))
    assert made.digest() == digest


@pytest.mark.parametrize("batch", [1, 4])
def test_eviction_waits_for_the_device_once_whatever_the_batch(batch: int) -> None:
    made, rows = cache(batch=batch), [[4, 0, -1], [-1, 2, 1], [-1, -1, -1], [3, 1, 2]]
    step(made, [5] * batch)
    with Waits() as waits:
        made.keep(0, torch.tensor(rows[:batch]))
    assert waits.names == ["tolist"]


def test_sequences_that_keep_other_counts_are_evicted_in_one_call() -> None:
    made = cache(batch=4)
    step(made, [5] * 4)
    made.keep(0, torch.tensor([[4, 0, -1], [-1, 2, 1], [-1, -1, -1], [3, 1, 2]]))
    assert made.positions(0).tolist() == [[0, 4, -1], [1, 2, -1], [-1, -1, -1], [1, 2, 3]]
    assert made.rows_held(0) == (2, 2, 0, 3)
    assert made.counters.rows_evicted == 20 - 7


@pytest.mark.parametrize(("batch", "max_tokens"), [(0, 8), (2, 0), (-1, 8)])
def test_a_cache_of_nothing_is_refused(batch: int, max_tokens: int) -> None:
    with pytest.raises(CacheError, match="batch and max_tokens"):
        ContiguousCache(
            FORMAT,
            layers=AttnLayerMap.all_of(2),
            batch=batch,
            max_tokens=max_tokens,
            device=torch.device("cpu"),
        )


def test_a_fork_copies_rows_only_if_the_span_evicts_or_truncates() -> None:
    made = cache()
    step(made, [4, 4])
    digest = made.digest()
    made.fork()
    step(made, [2, 2])
    assert made.saved_bytes == 0
    made.truncate([2, 2])
    assert made.saved_bytes == made.num_bytes
    step(made, [2, 2])
    made.discard()
    assert (made.digest(), made.saved_bytes) == (digest, 0)


@pytest.mark.parametrize("end", ["commit", "reset"])
def test_a_discard_brings_back_no_row_of_a_fork_that_ended_before(end: str) -> None:
    made = cache()
    step(made, [5, 5])
    made.fork()
    made.keep(0, torch.tensor([[0, 2], [1, 3]]))
    getattr(made, end)()
    assert made.saved_bytes == 0
    step(made, [3, 3])
    digest = made.digest()
    made.fork()
    made.keep(0, torch.tensor([[1], [0]]))
    made.discard()
    assert made.digest() == digest
