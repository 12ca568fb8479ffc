"""Beyond the end of a log that failed nothing can be resumed; before it a stream may be cut."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from scope_rt.control.planner import PlannedCounts
from scope_rt.control.resume_point import ResumePoint
from scope_rt.control.saved_points import SavedResumePoints
from scope_rt.control.tail import StreamTail
from scope_rt.record.log import NullLog
from scope_rt.record.snapshot import SnapshotStore


class FailingLog(NullLog):
    """Its disk is full from a moment on."""

    offset = 100

    def __init__(self, *, in_save: bool) -> None:
        self._is_full, self._in_save = False, in_save

    def fill(self) -> None:
        self._is_full, self.failure = True, None if self._in_save else "full"

    def when_written(self, call: Callable[[int], None]) -> Callable[[], None]:
        if self._is_full:
            self.failure = "full"
        else:
            call(self.offset)
        return lambda: None


def before(chunk: int) -> ResumePoint:
    """The point of a stream that continues with `chunk`."""
    counts = PlannedCounts(
        next_call_id=chunk,
        next_chunk_index=chunk,
        cache_epoch=0,
        next_start_frame=0,
        chunks_in_epoch=0,
    )
    return ResumePoint(
        base_seed=7,
        kv_cache_attention_bias=1.0,
        counts=counts,
        conditioning=None,
        transition=None,
        asked_again=(),
        first_scheduled=chunk,
        later=(),
        num_acknowledged=chunk,
        pending=(),
        tail=StreamTail(),
    )


@pytest.mark.parametrize(
    ("in_save", "led_to"), [(False, {6: 5, 3: 3, 4: 3}), (True, {3: 3}), (True, {6: 5})]
)
def test_where_the_log_has_failed_only_a_point_that_leads_no_further_is_saved(
    tmp_path: Path, in_save: bool, led_to: dict[int, int]
) -> None:
    """`led_to`: where the snapshot leads after each save."""
    store, log = SnapshotStore(tmp_path / "snapshot"), FailingLog(in_save=in_save)
    points = SavedResumePoints(store=store, log=tmp_path / "log", run_id="", identity=())
    points.begin(before(5), log=log)()
    log.fill()
    for chunk, want in led_to.items():
        points.begin(before(chunk), log=log)()
        header = store.header()
        assert header is not None
        assert (header.next_chunk_index, header.log_offset) == (want, log.offset)


def test_a_cut_before_the_newest_chunk_is_saved_where_the_log_failed_after_that_chunk_was_saved(
    tmp_path: Path,
) -> None:
    store, log = SnapshotStore(tmp_path / "snapshot"), FailingLog(in_save=False)
    points = SavedResumePoints(store=store, log=tmp_path / "log", run_id="", identity=())
    wait = points.begin(before(5), log=log)
    log.fill()
    wait()
    cut = replace(before(5), is_cut=True)
    points.begin(cut, log=log)()
    loaded = store.load(ResumePoint)
    assert loaded is not None
    assert loaded[1].is_cut
