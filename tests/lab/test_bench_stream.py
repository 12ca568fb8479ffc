import json
from pathlib import Path

import pytest

from scope_lab import bench_stream
from scope_lab.main import main as lab
from scope_rt.record.reader import read_history
from scope_rt.record.snapshot import look


@pytest.mark.lab
def test_json_holds_a_ratio_for_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert lab(["bench_stream", "--rounds", "2", "--chunks", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result["frames_per_s"]) == [
        "single, end to end",
        "single, nothing kept or verified",
        "generation only",
        "decode only",
        "encode only",
    ]
    for figure in result["frames_per_s"].values():
        assert 0 < figure["lowest"] <= figure["median"] <= figure["highest"]
        assert figure["ratio"] == figure["median"] / result["fps"]
    assert 0 < result["overhead_share"] < 1
    assert 0 < result["bare_overhead_share"] < 1


def test_the_measured_stream_has_what_every_stream_of_the_command_has(tmp_path: Path) -> None:
    bench = bench_stream.Bench(num_chunks=2, folder=tmp_path)
    for _ in range(2):
        bench.end_to_end()
        header, history = look(tmp_path / "bench.snapshot"), read_history(tmp_path / "bench.log")
        assert header is not None
        assert header.next_chunk_index % 2 == 0
        assert history.durable.keys() == history.finished.keys()


def test_the_bare_stream_keeps_and_verifies_nothing(tmp_path: Path) -> None:
    bench = bench_stream.Bench(num_chunks=2, folder=tmp_path)
    bench.end_to_end(bench_stream.BARE)
    assert [path.name for path in tmp_path.iterdir()] == ["bench.mp4"]
    assert not bench._sessions[bench_stream.BARE].setup.verifies
