"""A stream that is broken on purpose says so at its start, in its summary and in its recording."""

import json
from pathlib import Path

import pytest

from scope_rt.checks import Checks
from scope_rt.faults import FaultPoint
from scope_rt.instruments import Instruments
from scope_runners.break_it import stream
from scope_runners.break_it.detectors import Detector, checks_without
from scope_runners.break_it.faults import FaultPlan, at, encode
from scope_runners.break_it.instruments import DISARM, FAULTS
from scope_runners.main import main
from tests.runners.streams import SHORT

LATER = at(rank=0, chunk=99, point=FaultPoint.CALL, action="raise")
EVERY = ",".join(Detector)


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        (DISARM, "preflight,heartbeat", "these checks are off: heartbeat, preflight"),
        (DISARM, EVERY, "checks are off: settings, loaded_weights, weights"),
        (FAULTS, encode(FaultPlan(faults=(LATER,))), "raise at call of rank 0 from chunk 99"),
    ],
)
def test_what_is_broken_is_told_at_the_start_in_the_summary_and_in_the_recording(
    variable: str,
    value: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, value)
    out, scope = tmp_path / "a.mp4", tmp_path / "a.scope"
    assert stream.main([*SHORT[1:], "--out", str(out), "--record", str(scope)]) == 0
    printed = capsys.readouterr()
    assert "WARNING rank0 stream=a.mp4: this stream is broken on purpose: " in printed.err
    assert told in printed.err
    assert told in next(line for line in printed.out.splitlines() if line.startswith("broken"))
    assert told in json.loads((tmp_path / "a.json").read_text())["broken_on_purpose"]
    assert main(["inspect", str(scope)]) == 0
    assert told in next(
        line for line in capsys.readouterr().out.splitlines() if line.startswith("broken")
    )


def test_a_stream_as_it_should_be_says_nothing_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Instruments(checks=Checks()).broken_on_purpose == ""
    assert Instruments(checks=checks_without([])).broken_on_purpose == ""
    assert main([*SHORT, "--out", str(tmp_path / "a.mp4")]) == 0
    assert "broken" not in "".join(capsys.readouterr())
    assert json.loads((tmp_path / "a.json").read_text())["broken_on_purpose"] is None


def test_a_variable_that_this_stream_does_not_heed_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DISARM, EVERY)
    assert main([*SHORT, "--out", str(tmp_path / "a.mp4")]) == 0
    assert "SCOPE_DISARM: only ranks of scope-rt break-it heed it" in capsys.readouterr().err
