import json

import pytest

from scope_lab import bench_stream


def test_json_holds_a_ratio_for_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_stream.main(["--rounds", "2", "--chunks", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result["frames_per_s"]) == [
        "single, end to end",
        "generation only",
        "decode only",
        "encode only",
    ]
    for figure in result["frames_per_s"].values():
        assert 0 < figure["lowest"] <= figure["median"] <= figure["highest"]
        assert figure["ratio"] == figure["median"] / result["fps"]
    assert 0 < result["overhead_share"] < 1


def test_bad_arguments_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_stream.main(["--rounds", "0"]) == 2
    assert "--rounds" in capsys.readouterr().err
