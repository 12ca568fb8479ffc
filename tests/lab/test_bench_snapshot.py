from pathlib import Path

import pytest

from scope_lab import bench_snapshot


def test_the_bench_measures_what_a_save_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench_snapshot.main(["--chunks", "4", "--folder", str(tmp_path)])
    said = capsys.readouterr().out
    assert "MB in all (bar 10)" in said
    assert "stream log" in said
    assert list(tmp_path.iterdir()) == []
