"""The benchmark of edits checks what it times, and says what it was promised."""

from dataclasses import replace

import pytest
import torch

from scope_contracts.errors import CacheError
from scope_lab.kv_bench import hierarchical
from scope_lab.kv_bench.edit_times import PROMISED_AT, SystemTimes, curve, row
from scope_lab.kv_bench.hierarchical import EARLY_EDIT, Scale, time_system
from scope_rt.lm.hierarchical.context import Collapse, Edit
from scope_rt.lm.hierarchical.editing import EditableContext, EditReport
from scope_rt.lm.hierarchical.hierarchy import Hierarchy, Span
from scope_rt.lm.models.multilevel import MultilevelModel

SMALL = Scale(num_leaves=640, rounds=1)
HIERARCHY = Hierarchy(group=32, windows=(64, 32, None))


@pytest.fixture(scope="module")
def times() -> SystemTimes:
    return time_system("small", HIERARCHY, SMALL)


def test_every_dirty_fraction_is_timed_there_and_back(times: SystemTimes) -> None:
    assert tuple(edit.dirty_fraction for edit in times.edits) == (*PROMISED_AT, EARLY_EDIT)
    for edit in times.edits:
        assert len(edit.measured) == 2
        assert min(edit.measured) > 0
        assert edit.report.num_leaves == SMALL.num_leaves
        assert edit.report.full_recompute == (edit.predicted == 1.0)
    assert times.edits[-1].report.full_recompute
    assert times.undo.report.reused_leaves > 0
    made, plot = row(times, times.token_s), curve((times,))
    assert made.throughput_vs_contiguous == 1
    assert [line.is_model for line in plot.lines] == [False, True]
    assert [x for x, _ in plot.lines[0].points] == [0.05, 0.1, 0.2, 0.5, 0.9]


def test_a_row_says_which_promised_speed_up_was_met_and_which_was_missed(
    times: SystemTimes,
) -> None:
    measured = {0.5: 1.5, 0.2: 6.2, 0.1: 4.9, 0.05: 10.0}
    edits = tuple(
        replace(edit, predicted=1 / edit.dirty_fraction, measured=(measured[edit.dirty_fraction],))
        for edit in times.edits
        if edit.dirty_fraction in measured
    )
    assert row(replace(times, num_leaves=16_000, edits=edits), times.token_s).notes[-1] == (
        "promised are 25% around the formula, and least speed-ups; met: the formula at f=0.5 "
        "(-25%), the formula at f=0.2 (+24%), 10x at f=0.05 (10.0x); missed: the formula at f=0.1 "
        "(-51%), 5x at f=0.1 (4.9x), the formula at f=0.05 (-50%)"
    )
    too_short = "too short for the promised speed-ups, which are for 16,000 leaves"
    assert row(times, times.token_s).notes[-1] == too_short


@pytest.mark.parametrize("hierarchy", [HIERARCHY, hierarchical.FULL_ATTENTION], ids=str)
def test_the_copy_in_a_peak_is_the_largest_that_any_chunk_or_decoded_leaf_makes(
    hierarchy: Hierarchy,
) -> None:
    torch.manual_seed(0)
    model, group = MultilevelModel(hierarchical.CONFIG).eval(), hierarchical.GROUP
    edited = hierarchical._empty(model, hierarchy, SMALL.num_leaves + group)
    edited.append([1] * (SMALL.num_leaves + group - 1))
    gist_at = SMALL.num_leaves - group
    edited.edit([Collapse(gist_at)])
    chunks = Span(start=0, end=SMALL.num_leaves).cut(hierarchical.CHUNK_LEAVES)
    leaves = Span(start=SMALL.num_leaves, end=SMALL.num_leaves + hierarchical.DECODED_TOKENS)
    rows = [[len(run) for run in hierarchy.keys(it) if run] for it in (*chunks, *leaves.cut(1))]
    most = max(sum(runs) for runs in rows if len(runs) > 1)  # one run is read where it lies
    want = most * edited.cache.format.bytes_per_row
    assert hierarchical.largest_copy(edited, gist_at, SMALL) == want
    before = edited.cache.view(0)
    assert want > sum(plane.nbytes for plane in before), "no span showed more than the next leaf"


def test_a_peak_holds_the_copy_beside_the_cache_and_names_what_undo_keeps(
    times: SystemTimes,
) -> None:
    made = row(times, times.token_s)
    assert made.peak_bytes == times.num_bytes + times.copied_bytes > times.num_bytes
    chunk = hierarchical.CHUNK_LEAVES
    rows = sum(HIERARCHY.counts(SMALL.num_leaves)) - sum(HIERARCHY.counts(SMALL.num_leaves - chunk))
    row_bytes = times.num_bytes // sum(HIERARCHY.counts(times.max_leaves))
    # Two chunks that the edit replaced, then its own two, and of the first two one that came back.
    assert times.undo_kept_bytes == 3 * rows * row_bytes
    assert f"undo keeps {times.undo_kept_bytes:,} bytes" in made.notes[2]


def test_a_contiguous_decode_copies_no_row() -> None:
    made = hierarchical.contiguous(SMALL)
    hierarchical._timed_decode(made)
    assert made.cache.lengths == (SMALL.num_leaves + hierarchical.DECODED_TOKENS,)
    assert made.cache.counters.rows_read > SMALL.num_leaves * hierarchical.DECODED_TOKENS
    assert made.cache.counters.gathers == 0


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
