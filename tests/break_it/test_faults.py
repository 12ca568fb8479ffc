"""A fault happens once, where it was put, and is written down before it does any harm."""

import json
from pathlib import Path
from typing import Any

import pytest

from scope_contracts.errors import UserInputError
from scope_rt.faults import (
    FaultPlan,
    FaultPoint,
    InjectedFaults,
    at,
    decode,
    encode,
    read_log,
)


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
