import pytest

from scope_contracts.row_format import RowFormat
from scope_contracts.tensor_spec import DType
from scope_runners.kv_bench import needle, storage
from scope_runners.kv_bench.result import Effort, Part, SystemResult
from scope_runners.recall.sweep import PIECE_TOKENS
from scope_runners.recall.systems import EVICTING, FULL, SYSTEMS
from scope_runners.recall.tasks import Task

ROW_BYTES = 2 * 2 * 2 * 32 * 4
"""Of the recall model: layers, keys and values, heads, channels, float32."""


@pytest.fixture(scope="module")
def swept() -> Part:
    return needle.measure(Effort.QUICK)


@pytest.fixture(scope="module")
def stored() -> Part:
    return storage.measure(Effort.QUICK)


def row(part: Part, start: str) -> SystemResult:
    (found,) = [system for system in part.systems if system.name.startswith(start)]
    return found


def test_the_sweep_tells_every_system_and_every_task(swept: Part) -> None:
    assert [system.name.partition(",")[0] for system in swept.systems] == list(SYSTEMS)
    for system in swept.systems:
        assert [quality.name for quality in system.quality] == list(Task)


def test_systems_that_evict_hold_equally_many_rows_and_pay_for_what_they_note(swept: Part) -> None:
    assert row(swept, FULL).peak_bytes == 128 * ROW_BYTES
    for name in EVICTING:
        # One of the two layers holds the piece it reads, while the other was cut already.
        rows_of_a_layer = needle.CAPACITY + PIECE_TOKENS / 2
        assert row(swept, name).peak_bytes == rows_of_a_layer * (ROW_BYTES + 2 * (8 + 1 + 4))


def test_the_full_cache_solves_what_eviction_is_measured_on(swept: Part) -> None:
    assert all(quality.value > 90 for quality in row(swept, FULL).quality)


def test_paged_rows_answer_as_the_full_cache_does(swept: Part) -> None:
    assert row(swept, "paged").quality == row(swept, FULL).quality


def test_each_task_has_a_panel_over_budgets_and_one_over_depths(swept: Part) -> None:
    keys = [curve.key for curve in swept.curves]
    assert keys == ["needle_budget"] * len(Task) + ["needle_depth"] * len(Task)
    for curve in swept.curves:
        assert [line.name for line in curve.lines] == [FULL, *EVICTING]
        assert len({tuple(x for x, _ in line.points) for line in curve.lines}) == 1


def test_codecs_cost_the_bytes_that_their_format_says(stored: Part) -> None:
    plain, int8, int4 = (row(stored, f"contiguous {kind}") for kind in ("ident", "int8", "int4"))
    assert plain.bytes_per_token == ROW_BYTES
    assert int8.bytes_per_token == 2 * 2 * 2 * (32 + 2)
    assert int4.bytes_per_token == 2 * 2 * 2 * (16 + 8)
    assert plain.throughput_vs_contiguous == 1.0


def test_a_latent_row_is_a_tenth_of_the_heads_it_stands_for(stored: Part) -> None:
    heads = RowFormat.full(heads=24, head_dim=128, dtype=DType.FLOAT32).bytes_per_row
    for form in ("absorbed", "expanded"):
        assert heads / (row(stored, f"latent, {form}").bytes_per_token or 0) > 10


def test_kernels_that_are_not_here_say_why(stored: Part) -> None:
    reasons = [system.cannot_run for system in stored.systems if "read" in system.name]
    assert len(reasons) == 3
    assert all(reasons)
