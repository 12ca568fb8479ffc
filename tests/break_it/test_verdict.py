"""The suite can fail: what it holds against a run is found wherever it is wrong."""

from dataclasses import replace
from pathlib import Path

import pytest

from scope_rt.faults import FaultPoint, Happened, at
from scope_runners.break_it.events import Event, EventKind
from scope_runners.break_it.observation import Observation
from scope_runners.break_it.scenario import PP0, Case, Expected, Scenario, lost, refused_by
from scope_runners.break_it.script import RankJob, Script
from scope_runners.break_it.table import head, rows
from scope_runners.break_it.verdict import Result, Verdict, judge

FAULT = at(rank=1, chunk=3, point=FaultPoint.CALL, action="kill")
HAPPENED = Happened(action="kill", point=FaultPoint.CALL, rank=1, attempt=0, chunk=3, at_s=10.0)
REFERENCE = {chunk: f"digest {chunk}" for chunk in range(5)}
REFUSED = refused_by(1, PP0, "OrderError")
SURVIVED = lost(1, PP0, "killed", within_s=2.0)


def emitted(chunk: int, *, at_s: float = 9.0, attempt: int = 0, epoch: int = 0) -> Event:
    return Event(
        kind=EventKind.EMITTED,
        rank=0,
        attempt=attempt,
        at_s=at_s,
        chunk=chunk,
        epoch=epoch,
        sha256=f"digest {chunk}",
    )


def failed(rank: int, error: str, *, at_s: float = 10.5, text: str = "rank 1") -> Event:
    return Event(kind=EventKind.FAILED, rank=rank, attempt=0, at_s=at_s, error=error, text=text)


def seen(*events: Event, happened: tuple[Happened, ...] = (HAPPENED,)) -> Observation:
    script = Script(num_chunks=5)
    job = RankJob(model="", plan="pp0", tp=1, prompt="", script=script, folder="/nowhere")
    return Observation(
        job=job,
        num_ranks=2,
        events=events,
        happened=happened,
        began_s=0.0,
        ended_s=20.0,
        is_hung=False,
        left_behind=(),
    )


def judged(observation: Observation, expected: Expected = REFUSED) -> Result:
    case = Case(number=0, name="a fault", what="", natural=PP0, build=lambda topology, pace: None)
    scenario = Scenario(topology=PP0, faults=(FAULT,), expected=expected)
    return judge(case, scenario, observation, REFERENCE)


BOTH_SAY_SO = (failed(1, "OrderError"), failed(0, "PeerLostError", at_s=10.6))
A_REFUSAL = seen(emitted(0), emitted(1), *BOTH_SAY_SO)
A_RECOVERY = seen(
    *map(emitted, range(3)),
    failed(0, "PeerLostError"),
    *(emitted(chunk, at_s=14.0, attempt=1) for chunk in (3, 4)),
)


def test_what_was_expected_passes() -> None:
    result = judged(A_REFUSAL)
    assert (result.verdict, result.complaints) == (Verdict.PASSED, ())
    assert result.detected_s == 0.5
    result = judged(A_RECOVERY, SURVIVED)
    assert (result.verdict, result.complaints) == (Verdict.PASSED, ())
    assert (result.detected_s, result.resumed_s, result.num_chunks) == (0.5, 3.5, 5)


def test_a_chunk_with_other_bits_than_a_clean_runs_is_drift() -> None:
    wrong = replace(emitted(1), sha256="other")
    result = judged(seen(emitted(0), wrong, *BOTH_SAY_SO))
    assert (result.verdict, result.num_wrong) == (Verdict.DRIFTED, 1)


def test_a_chunk_of_an_epoch_that_was_cut_off_is_drift() -> None:
    cut = Event(kind=EventKind.CUT, rank=0, attempt=0, at_s=9.5, chunk=1, epoch=1)
    result = judged(seen(emitted(0), cut, emitted(1, epoch=0), *BOTH_SAY_SO))
    assert (result.verdict, result.num_wrong) == (Verdict.DRIFTED, 1)


def test_a_run_that_had_to_be_ended_hung() -> None:
    assert judged(replace(A_REFUSAL, is_hung=True)).verdict is Verdict.HUNG


@pytest.mark.parametrize(
    ("observation", "expected", "complaint"),
    [
        (
            seen(failed(1, "LifecycleError"), failed(0, "PeerLostError")),
            REFUSED,
            "rank 1: LifecycleError, want OrderError",
        ),
        (seen(failed(1, "OrderError")), REFUSED, "rank 0: silent"),
        (
            seen(failed(1, "OrderError", at_s=13.0), failed(0, "PeerLostError")),
            REFUSED,
            "rank 1 said so after 3.0 s, want 2 s",
        ),
        (replace(A_REFUSAL, happened=()), REFUSED, "the fault did not happen"),
        (replace(A_REFUSAL, left_behind=(4711,)), REFUSED, "processes left behind: (4711,)"),
        (seen(emitted(0), emitted(2), *BOTH_SAY_SO), REFUSED, "no chunk between 0 and 2"),
        (seen(emitted(0), emitted(0), *BOTH_SAY_SO), REFUSED, "chunks came as [0, 0]"),
        (
            seen(emitted(0), failed(0, "PeerLostError", text="somebody")),
            SURVIVED,
            "nobody mentions rank 1",
        ),
        (seen(emitted(0), failed(0, "PeerLostError")), SURVIVED, "the stream did not go on"),
        (
            seen(failed(0, "PeerLostError"), emitted(0, at_s=30.0, attempt=1)),
            SURVIVED,
            "went on after 19.5 s, want 15 s",
        ),
        (
            seen(failed(0, "PeerLostError"), emitted(0, at_s=12.0, attempt=1)),
            SURVIVED,
            "1 of 5 chunks",
        ),
    ],
)
def test_whatever_went_otherwise_fails_and_is_told(
    observation: Observation, expected: Expected, complaint: str
) -> None:
    result = judged(observation, expected)
    assert result.verdict is Verdict.FAILED
    assert any(said.startswith(complaint) for said in result.complaints), result.complaints


def test_the_table_keeps_to_120_columns_whatever_it_has_to_say(tmp_path: Path) -> None:
    result = replace(
        judged(A_REFUSAL),
        name="a-fault/with-a-rather/long-name-of-its-own",
        ends=("LinkTimeoutError", "FingerprintError", "SlowRankError", "UserInputError"),
        verdict=Verdict.FAILED,
        complaints=("a complaint " * 20,),
        sentences=("rank 0: said a lot " * 20,),
    )
    lines = f"{head()}\n{rows(result)}".splitlines()
    assert max(map(len, lines)) <= 120
    assert any("FingerprintError 1" in line for line in lines)
