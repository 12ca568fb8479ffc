"""The suite can fail: what it holds against a run is found wherever it is wrong."""

from dataclasses import replace
from pathlib import Path

import pytest

from scope_rt.faults import FaultPoint
from scope_runners.break_it.catalogue import case_named
from scope_runners.break_it.detectors import Detector
from scope_runners.break_it.events import Event, EventKind
from scope_runners.break_it.faults import InjectedFault, at
from scope_runners.break_it.job import RankJob, Script
from scope_runners.break_it.observation import Observation
from scope_runners.break_it.scenario import (
    PP0,
    TP2,
    Case,
    Expected,
    Pace,
    Scenario,
    lost,
    refused_by,
    unaffected,
)
from scope_runners.break_it.table import head, rows, tally
from scope_runners.break_it.trials import Outcome, Trial, TrialResult, judge_trial
from scope_runners.break_it.verdict import Result, Verdict, judge

FAULT = at(rank=1, chunk=3, point=FaultPoint.CALL, action="kill")
HAPPENED = InjectedFault(
    action="kill", point=FaultPoint.CALL, rank=1, attempt=0, chunk=3, at_s=10.0
)
REFERENCE = {chunk: f"digest {chunk}" for chunk in range(5)}
REFUSED = refused_by(1, PP0, "OrderError")
SURVIVED = lost(1, PP0, "killed", within_s=2.0)
NAMED = "rank 1 closed the connection"


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


def failed(rank: int, error: str, *, at_s: float = 10.5, text: str = NAMED) -> Event:
    return Event(kind=EventKind.FAILED, rank=rank, attempt=0, at_s=at_s, error=error, text=text)


def ended(rank: int, code: int, *, at_s: float = 10.7, attempt: int = 0, text: str = "") -> Event:
    kind = EventKind.ENDED
    return Event(kind=kind, rank=rank, attempt=attempt, at_s=at_s, text=text, code=code)


def left(rank: int, *, attempt: int) -> Event:
    return Event(kind=EventKind.LEFT, rank=rank, attempt=attempt, at_s=15.0)


def seen(*events: Event, happened: tuple[InjectedFault, ...] = (HAPPENED,)) -> Observation:
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
    case = Case(
        number=0,
        name="a fault",
        description="",
        default_topology=PP0,
        build=lambda topology, pace: None,
    )
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
            "rank 1 reported it after 3.0 s, want 2 s",
        ),
        (replace(A_REFUSAL, happened=()), REFUSED, "the fault did not happen"),
        (replace(A_REFUSAL, left_behind=(4711,)), REFUSED, "processes left behind: (4711,)"),
        (seen(emitted(0), emitted(2), *BOTH_SAY_SO), REFUSED, "no chunk between 0 and 2"),
        (seen(emitted(0), emitted(0), *BOTH_SAY_SO), REFUSED, "chunks came as [0, 0]"),
        (
            seen(emitted(0), failed(0, "PeerLostError", text="from rank 1: the peer is gone")),
            SURVIVED,
            "rank 0 says 'from rank 1: the peer is gone', want",
        ),
        (seen(emitted(0), failed(0, "PeerLostError")), SURVIVED, "the stream did not resume"),
        (
            seen(failed(0, "PeerLostError"), emitted(0, at_s=30.0, attempt=1)),
            SURVIVED,
            "resumed after 19.5 s, want 15 s",
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


def with_more(observation: Observation, *events: Event) -> Observation:
    return replace(observation, events=(*observation.events, *events))


def test_orderly_erring_and_killed_ranks_have_exit_codes_of_their_own() -> None:
    ends = ended(0, 1), ended(1, -9), ended(0, 0, attempt=1), ended(1, 0, attempt=1)
    again = left(0, attempt=1), left(1, attempt=1)
    assert judged(with_more(A_RECOVERY, *again, *ends), SURVIVED).verdict is Verdict.PASSED
    assert judged(with_more(A_REFUSAL, ended(0, 1), ended(1, 2)), REFUSED).verdict is Verdict.PASSED


def test_what_the_launcher_ended_late_is_not_held_against_a_rank() -> None:
    ends = ended(1, 1, at_s=10.7), ended(0, -9, at_s=12.3)
    assert judged(with_more(A_REFUSAL, *ends)).verdict is Verdict.PASSED


@pytest.mark.parametrize(
    ("observation", "expected", "complaint"),
    [
        (
            with_more(A_REFUSAL, ended(0, -6), ended(1, 1)),
            REFUSED,
            "rank 0 of attempt 0: PeerLostError, and its exit code was -6",
        ),
        (with_more(A_REFUSAL, ended(0, 0)), REFUSED, "rank 0 of attempt 0: PeerLostError, and"),
        (with_more(A_REFUSAL, ended(0, -9)), REFUSED, "rank 0 of attempt 0: PeerLostError, and"),
        (with_more(A_RECOVERY, ended(1, -11)), SURVIVED, "rank 1 of attempt 0: killed, and"),
        (
            with_more(A_RECOVERY, left(1, attempt=1), ended(1, -6, attempt=1)),
            SURVIVED,
            "rank 1 of attempt 1: left, and its exit code was -6",
        ),
        (with_more(A_RECOVERY, ended(1, 1, attempt=1)), SURVIVED, "rank 1 of attempt 1: silent"),
        (
            with_more(A_RECOVERY, ended(-1, 1, text="torchrun on host b")),
            SURVIVED,
            "torchrun on host b: left, and its exit code was 1",
        ),
    ],
)
def test_a_process_that_ends_otherwise_than_its_rank_said_is_told(
    observation: Observation, expected: Expected, complaint: str
) -> None:
    result = judged(observation, expected)
    assert result.verdict is Verdict.FAILED
    assert result.complaints[0].startswith(complaint), result.complaints


PACE = Pace(heartbeat_s=5.0, chunk_s=0.2, num_calls=5)


def complaints_about(name: str, *events: Event, action: str, rank: int) -> tuple[str, ...]:
    """Of a run of a real case of which nothing else is wrong."""
    case = case_named(name)
    scenario = case.build(case.default_topology, PACE)
    assert scenario is not None
    broke = InjectedFault(
        action=action, point=FaultPoint.CALL, rank=rank, attempt=0, chunk=3, at_s=10.0
    )
    script = scenario.script
    before = [emitted(chunk) for chunk in range(3)]
    after = [emitted(chunk, at_s=21.0, attempt=1) for chunk in range(3, script.num_chunks)]
    restored = Event(kind=EventKind.RESTORED, rank=-1, attempt=0, at_s=20.0)
    run = seen(*before, *events, restored, *after, happened=(broke,))
    observation = replace(
        run, num_ranks=case.default_topology.world_size, job=replace(run.job, script=script)
    )
    reference = {chunk: f"digest {chunk}" for chunk in range(script.num_chunks)}
    return judge(case, scenario, observation, reference).complaints


def test_every_other_rank_must_name_the_killed_one_and_not_only_its_connection_to_it() -> None:
    def told(*texts: str) -> tuple[str, ...]:
        lost = [
            failed(rank, "PeerLostError", text=t) for rank, t in zip((0, 2), texts, strict=True)
        ]
        return complaints_about("kill/leader/denoise", *lost, action="kill", rank=1)

    right, wrong = f"chunk 3: receive from rank 1: {NAMED}", "receive from rank 1: rank 2 closed"
    assert told(right, right) == ()
    assert [said[:11] for said in told(wrong, right)] == ["rank 0 says"]
    assert [said[:11] for said in told(right, wrong)] == ["rank 2 says"]


def test_both_hosts_of_a_cut_cable_have_the_one_bound() -> None:
    def told(near_s: float, far_s: float) -> tuple[str, ...]:
        texts = "rank 1 sent no heartbeat for 4.2 s", "the store at 10.0.0.1:2 did not answer"
        cut = [
            failed(rank, "LinkTimeoutError", at_s=10.0 + error_s, text=text)
            for rank, error_s, text in zip((0, 1), (near_s, far_s), texts, strict=True)
        ]
        return complaints_about("cable-cut", *cut, action="cut_cable", rank=-1)

    assert told(4.2, 4.9) == ()
    assert told(4.2, 5.1) == ("rank 1 reported it after 5.1 s, want 5 s",)


def test_a_setting_has_happened_when_every_rank_has_come_with_it() -> None:
    case = case_named("backend-mismatch")
    scenario = case.build(TP2, PACE)
    assert scenario is not None
    opening = [
        Event(kind=EventKind.OPENING, rank=rank, attempt=0, at_s=10.0 + rank) for rank in (0, 1)
    ]
    refused = [failed(rank, "ParityError", at_s=11.5) for rank in (0, 1)]
    result = judge(case, scenario, seen(*opening, *refused, happened=()), {})
    assert (result.complaints, result.has_happened, result.detected_s) == ((), True, 0.5)
    result = judge(case, scenario, seen(opening[0], *refused, happened=()), {})
    assert (result.complaints, result.has_happened) == (("the fault did not happen",), False)


def without_its_detector(observation: Observation) -> TrialResult:
    trial = Trial(disarmed=(Detector.HEARTBEAT,), case="stop/follower")
    armed, disarmed = judged(A_REFUSAL), judged(observation)
    return judge_trial(trial, armed=armed, disarmed=disarmed, seen=observation, chunk_s=0.2)


def test_a_run_that_was_ended_before_its_fault_shows_nothing_of_a_detector() -> None:
    hung = replace(seen(emitted(0)), is_hung=True)
    shown = without_its_detector(hung)
    assert (shown.outcome, shown.shows_it) == (Outcome.HANG, True)
    slow = without_its_detector(replace(hung, happened=()))
    assert (slow.outcome, slow.shows_it) == (Outcome.NOTHING, False)
    assert slow.what_happened == "the fault did not happen"
    failed_early = with_more(replace(hung, happened=()), failed(0, "LinkTimeoutError", text="why"))
    told = without_its_detector(failed_early).what_happened
    assert told == "the fault did not happen; rank 0: LinkTimeoutError: why"


def test_faults_that_have_no_effect_or_were_not_run_are_not_counted_as_caught() -> None:
    caught = judged(A_REFUSAL)
    harmless = replace(caught, is_unharmed=unaffected(PP0, headline="").is_unharmed)
    skipped = replace(caught, name="cable-cut", verdict=Verdict.NOT_RUN)
    said = tally([caught, harmless, skipped, caught])
    assert said == "4 runs: 2 caught, 1 unharmed, 1 not run (cable-cut)"


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
