"""The bench of a GPU runs on a CPU at tiny sizes, tells as it goes, and keeps to its budget."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from scope_lab.gpu_bench import run
from scope_lab.gpu_bench.run import Phase, main, phases_of
from scope_lab.gpu_bench.sizes import REAL, SIZES

TINY = ["--sizes", "tiny", "--device", "cpu"]


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_each_phase_measures_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    """In this process; what a GPU alone has is named as skipped."""
    told = {}
    for phase in phases_of(SIZES["tiny"]):
        if phase.measure is not None:
            assert main([*TINY, "--phase", phase.name]) == 0
            told[phase.name] = lines_of(capsys.readouterr().out)
    assert all(told.values())
    chunk = told["stream tiny"][1]
    assert len(chunk["calls_ms"]) == 5
    assert chunk["operators"] > 0
    assert chunk["launches"] == chunk["syncs"] == 0
    assert {line["backend"] for line in told["attention"]} >= {"sdpa", "lse_merge"}
    assert told["ceilings"][0]["gb_s"] > 0


def test_what_is_told_is_whole_json_and_goes_to_a_file_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gpu.jsonl"
    assert main([*TINY, "--only", "machine", "--budget", "500", "--out", str(out)]) == 0
    told = lines_of(capsys.readouterr().out)
    assert [line["phase"] for line in told] == ["machine", "machine"]
    assert told[0]["device"] == "cpu"
    assert lines_of(out.read_text()) == told


def test_a_phase_that_hangs_is_ended_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hangs = ["-c", "import time; print('{\"n\": 1}', flush=True); time.sleep(60)"]
    assert not run._run("hangs", [sys.executable, *hangs], 1.0, None)
    fails = ["-c", "raise SystemExit('no memory')"]
    assert not run._run("fails", [sys.executable, *fails], 30.0, None)
    first, late, failed = lines_of(capsys.readouterr().out)
    assert first == {"phase": "hangs", "n": 1}
    assert "ended after 1 s" in late["failed"]
    assert failed["failed"] == "ended with 1: no memory"


def test_what_no_time_is_left_for_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--budget", "0"]) == 0
    told = lines_of(capsys.readouterr().out)
    assert all(line["skipped"] == "no time is left" for line in told)
    assert len(told) == len(phases_of(SIZES["tiny"]))


def test_no_phase_has_more_than_its_share() -> None:
    phases = phases_of(REAL)
    assert all(isinstance(phase, Phase) and 0 < phase.share <= 0.35 for phase in phases)
    assert {"stream wan-1.3b", "stream krea-14b", "tests/gpu"} <= {each.name for each in phases}
