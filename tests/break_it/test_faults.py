"""A fault happens once, where it was put, and is written down before it does any harm."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from scope_contracts.errors import UserInputError
from scope_rt.checks import Checks
from scope_rt.faults import FaultPoint
from scope_runners.break_it.detectors import Detector, checks_without
from scope_runners.break_it.faults import FaultPlan, InjectedFaults, at, decode, encode, read_log
from scope_runners.break_it.instruments import instruments_from_environment


def injected(*faults: Any, rank: int = 1, attempt: int = 0, log: Path | None = None) -> Any:
    plan = FaultPlan(faults=faults, log=None if log is None else str(log))
    return InjectedFaults(decode(encode(plan)), rank=rank, attempt=attempt)


COUNTED = at(rank=1, chunk=3, point=FaultPoint.CALL, action="count", instead=2)


def test_a_fault_happens_at_its_rank_point_chunk_and_attempt_only() -> None:
    faults = injected(COUNTED)
    assert faults.reach(FaultPoint.CALL, 2, 1) == 1
    assert faults.reach(FaultPoint.IDLE, 3, 1) == 1
    assert injected(COUNTED, rank=0).reach(FaultPoint.CALL, 3, 1) == 1
    assert injected(COUNTED, attempt=1).reach(FaultPoint.CALL, 3, 1) == 1
    assert faults.reach(FaultPoint.CALL, 3, 1) == 2
    assert faults.reach(FaultPoint.CALL, 3, 1) == 1


def test_what_is_about_to_happen_is_written_down_first(tmp_path: Path) -> None:
    log = tmp_path / "faults.jsonl"
    fault = at(rank=1, chunk=3, point=FaultPoint.CALL, action="raise")
    with pytest.raises(ZeroDivisionError):
        injected(fault, log=log).reach(FaultPoint.CALL, 4, 1)
    (happened,) = read_log(log.read_text().splitlines())
    assert (happened.action, happened.rank, happened.chunk) == ("raise", 1, 4)


def test_what_was_sent_before_can_come_again() -> None:
    sending = FaultPoint.SENDING
    faults = injected(at(rank=1, chunk=3, point=sending, action="send_again"))
    assert faults.reach(sending, 2, ["two"]) == ["two"]
    assert faults.reach(sending, 3, ["three"]) == ["two", "three"]
    assert faults.reach(sending, 4, ["four"]) == ["four"]


def test_two_messages_change_places() -> None:
    sending = FaultPoint.SENDING
    faults = injected(
        at(rank=1, chunk=3, point=sending, action="withhold"),
        at(rank=1, chunk=4, point=sending, action="send_after"),
    )
    assert faults.reach(sending, 3, ["three"]) == []
    assert faults.reach(sending, 4, ["four"]) == ["four", "three"]


@pytest.mark.parametrize("text", ["", "[]", '{"faults": [{}]}', '{"faults": 3, "log": null}'])
def test_an_unreadable_plan_is_refused_by_its_variable(text: str) -> None:
    with pytest.raises(UserInputError, match="SCOPE_FAULTS cannot be read"):
        decode(text)


def test_an_unknown_action_is_refused_before_anything_runs() -> None:
    plain = json.loads(encode(FaultPlan(faults=(COUNTED,))))
    plain["faults"][0]["action"] = "explode"
    with pytest.raises(UserInputError, match="no action is called explode"):
        decode(json.dumps(plain))


def test_a_rank_that_nobody_breaks_loads_nothing_that_could_break_it() -> None:
    code = "import sys, scope_runners.stream; print(*[m for m in sys.modules if 'break_it' in m])"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, text=True
    )
    assert loaded.stdout.split() == []


def test_every_detector_can_be_disarmed_and_no_check_is_left_without_a_detector() -> None:
    real = Checks()
    replaced = {
        check.name
        for detector in Detector
        for check in fields(Checks)
        if getattr(checks_without([detector]), check.name) is not getattr(real, check.name)
    }
    assert replaced == {check.name for check in fields(Checks)}
    assert all(checks_without([detector]) != real for detector in Detector)
    assert checks_without([]) == real


def test_an_unknown_detector_is_refused_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCOPE_DISARM", "preflight,smoke")
    with pytest.raises(UserInputError, match="SCOPE_DISARM: 'smoke' is not a valid Detector"):
        instruments_from_environment()
