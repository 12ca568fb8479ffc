import pytest

from scope_contracts.row_format import CodecKind, RowFormat
from scope_contracts.tensor_spec import DType
from scope_lab.kv_bench import needle, states, storage
from scope_lab.kv_bench.result import Effort, Part, SystemResult
from scope_lab.recall.sweep import DEPTHS, PIECE_TOKENS
from scope_lab.recall.systems import CODECS, EVICTING, FULL, SYSTEMS
from scope_lab.recall.tasks import Task
from scope_rt.lm.specs.row_storage import BLOCK_SIZE

pytestmark = pytest.mark.lab

ROW_BYTES = 2 * 2 * 2 * 32 * 4
"""Of the recall model: layers, keys and values, heads, channels, float32."""
INT8_LAYER_BYTES = 2 * 2 * (32 + 2)
"""Keys and values, heads, channels and a float16 scale."""


@pytest.fixture(scope="module")
def swept() -> Part:
    return needle.measure(Effort.QUICK)


@pytest.fixture(scope="module")
def stored() -> Part:
    return storage.measure(Effort.QUICK)


def row(part: Part, start: str) -> SystemResult:
    (found,) = [system for system in part.systems if system.name.startswith(start)]
    return found


def swept_row(part: Part, system: str) -> SystemResult:
    return row(part, f"{system}, 128 tokens")


def test_the_sweep_reports_every_system_and_every_task(swept: Part) -> None:
    assert [system.name for system in swept.systems] == [f"{name}, 128 tokens" for name in SYSTEMS]
    for system in swept.systems:
        assert [quality.name for quality in system.quality] == list(Task)


def test_systems_that_evict_hold_equally_many_rows_and_pay_for_what_they_note(swept: Part) -> None:
    assert swept_row(swept, FULL).peak_bytes == 128 * ROW_BYTES
    read_rows = needle.CAPACITY + PIECE_TOKENS
    # One of the two layers holds the piece it reads, while the other was cut already.
    rows_of_a_layer = (needle.CAPACITY + read_rows) / 2
    for name in EVICTING:
        is_coded = name in CODECS
        row_bytes = 2 * INT8_LAYER_BYTES if is_coded else ROW_BYTES
        held = rows_of_a_layer * (row_bytes + 2 * (8 + 1 + 4))
        decoded = read_rows * ROW_BYTES / 2 if is_coded else 0
        assert swept_row(swept, name).peak_bytes == held + decoded


def test_systems_that_copy_a_layer_count_the_copy(swept: Part, stored: Part) -> None:
    layer = 128 * ROW_BYTES / 2
    assert swept_row(swept, "int8").peak_bytes == 128 * 2 * INT8_LAYER_BYTES + layer
    zero_block = BLOCK_SIZE * ROW_BYTES / (len(DEPTHS) * needle.TEXTS_PER_DEPTH[Effort.QUICK])
    assert swept_row(swept, "paged").peak_bytes == int(128 * ROW_BYTES + zero_block + layer)
    tokens = states.SCALES[Effort.QUICK].max_tokens
    for kind in CodecKind:
        held = tokens * (row(stored, f"contiguous {kind}").bytes_per_token or 0)
        copied = 0 if kind is CodecKind.IDENTITY else tokens * ROW_BYTES / 2
        assert row(stored, f"contiguous {kind}").peak_bytes == held + copied


def test_the_full_cache_solves_what_eviction_is_measured_on(swept: Part) -> None:
    assert all(quality.value > 90 for quality in swept_row(swept, FULL).quality)


def test_paged_rows_answer_as_the_full_cache_does(swept: Part) -> None:
    assert swept_row(swept, "paged").quality == swept_row(swept, FULL).quality


def test_each_task_has_a_panel_over_budgets_and_one_over_depths(swept: Part) -> None:
    keys = [curve.key for curve in swept.curves]
    assert keys == ["needle_budget"] * len(Task) + ["needle_depth"] * len(Task)
    for curve in swept.curves:
        assert [line.name for line in curve.lines] == [FULL, *EVICTING]
        assert len({tuple(x for x, _ in line.points) for line in curve.lines}) == 1


def test_codecs_cost_the_bytes_that_their_format_says(stored: Part) -> None:
    plain, int8, int4 = (row(stored, f"contiguous {kind}") for kind in ("ident", "int8", "int4"))
    assert plain.bytes_per_token == ROW_BYTES
    assert int8.bytes_per_token == 2 * INT8_LAYER_BYTES
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
