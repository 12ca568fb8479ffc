from pathlib import Path

import pytest
import torch

from scope_lab import bench_snapshot
from scope_rt.control.resume_point import ResumePoint
from scope_rt.record.snapshot import SnapshotStore


def test_the_bench_measures_what_a_save_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench_snapshot.main(["--chunks", "4", "--events", "3", "--folder", str(tmp_path)])
    said = capsys.readouterr().out
    assert "4 kept" in said
    assert "3 events" in said
    assert "MB in all (bar 10)" in said
    assert "stream log" in said
    assert list(tmp_path.iterdir()) == []


def test_what_is_saved_is_a_resume_point_without_the_schedule_that_its_log_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_snapshot, "LATENTS_SHAPE", (1, 3, 16, 6, 10))
    figures = bench_snapshot.measure(
        tmp_path, num_chunks=20, num_tokens=1, num_events=3, dtype=torch.bfloat16
    )
    loaded = SnapshotStore(tmp_path / "snapshot").load(ResumePoint)
    assert loaded is not None
    header, point = loaded
    assert header.next_chunk_index == point.counts.next_chunk_index == 20
    assert point.scheduled == ()
    assert point.first_scheduled == 20
    assert (point.num_acknowledged, len(point.pending)) == (18, 2)
    # Before what is pending, 38 frames of the decoder and 3 of the context, in blocks of 3.
    assert len(point.tail.chunks) == figures.num_kept == 2 + 14
