"""The benchmark of edits checks what it times, and says what it was promised."""

import pytest
import torch

from scope_contracts.errors import CacheError
from scope_rt.kv_cache.hierarchical.context import Edit
from scope_rt.kv_cache.hierarchical.editing import EditableContext, EditReport
from scope_rt.kv_cache.hierarchical.hierarchy import Hierarchy
from scope_runners.kv_bench import hierarchical
from scope_runners.kv_bench.hierarchical import EARLY_EDIT, PROMISED_AT, Scale, time_system

SMALL = Scale(num_leaves=640, rounds=1)
HIERARCHY = Hierarchy(group=32, windows=(64, 32, None))


def test_every_dirty_fraction_is_timed_there_and_back() -> None:
    times = time_system("small", HIERARCHY, SMALL)
    assert tuple(edit.dirty_fraction for edit in times.edits) == (*PROMISED_AT, EARLY_EDIT)
    for edit in times.edits:
        assert len(edit.measured) == 2
        assert min(edit.measured) > 0
        assert edit.report.num_leaves == SMALL.num_leaves
        assert edit.report.full_recompute == (edit.predicted == 1.0)
    assert times.edits[-1].report.full_recompute
    assert times.undo.report.reused_leaves > 0
    row, curve = hierarchical._row(times, times.token_s), hierarchical._curve((times,))
    assert row.throughput_vs_contiguous == 1
    assert [line.is_model for line in curve.lines] == [False, True]
    assert [x for x, _ in curve.lines[0].points] == [0.05, 0.1, 0.2, 0.5, 0.9]


def test_an_edit_that_leaves_other_rows_than_a_recompute_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = EditableContext.edit

    def wrong(self: EditableContext, edits: list[Edit]) -> EditReport:
        report = right(self, edits)
        self.cache.levels[1].parts[0][0][0, 0, 3] += torch.tensor(1e-6)
        return report

    monkeypatch.setattr(EditableContext, "edit", wrong)
    with pytest.raises(CacheError, match="differs from a full recompute of its context"):
        time_system("small", HIERARCHY, SMALL)
