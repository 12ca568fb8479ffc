"""Observation is compared with expectation: a fault passes when it ended as it must, on every rank.

Two outcomes outweigh every other: a run that had to be killed is a hang, and a chunk that is not
bit for bit the chunk of a clean run is drift, unless the fault is one that is found within M chunks
and it was found within them.
"""

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from scope_rt.topology import Topology
from scope_runners.break_it.events import Event, EventKind
from scope_runners.break_it.observation import KILLED, LEFT, SILENT, STOPPED, Observation
from scope_runners.break_it.scenario import RESUME_S, Case, Expected, Scenario
from scope_runners.exit_codes import BAD_INPUT, DISK_FULL, FAILED, INTEGRITY
from scope_runners.rank_group import LINGER_S

_CODES = {
    LEFT: {0},
    KILLED: {-signal.SIGKILL},
    STOPPED: {-signal.SIGKILL},
    SILENT: set[int](),
}
"""The exit codes that go with each end."""
_ERRED = {FAILED, BAD_INPUT, DISK_FULL, INTEGRITY}
"""The exit codes that go with an error."""


class Verdict(StrEnum):
    """How a fault ended."""

    PASSED = "passed"
    HUNG = "HANG"
    DRIFTED = "DRIFT"
    FAILED = "FAILED"
    NOT_RUN = "not run"

    @property
    def is_failure(self) -> bool:
        """Whether the fault did not end as it must."""
        return self in (Verdict.HUNG, Verdict.DRIFTED, Verdict.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One row of the table. Seconds are None where there is nothing to measure."""

    number: int
    name: str
    description: str
    plan: str
    tp: int
    expected: str
    verdict: Verdict
    is_unharmed: bool = False
    """No error was expected: the fault had to have no effect."""
    has_happened: bool = False
    """Whether the fault was seen to happen: without it, nothing is known about its detector."""
    ends: tuple[str, ...] = ()
    """How the first attempt of each rank ended."""
    sentences: tuple[str, ...] = ()
    """The errors of the ranks, in order."""
    detected_s: float | None = None
    """To the first error that was expected."""
    detected_chunks: int | None = None
    """The same in chunks: 0 where it was found with the chunk in which the fault happened."""
    error_s: tuple[float | None, ...] = ()
    """To the error of every rank."""
    num_chunks: int = 0
    num_wrong: int = 0
    resumed_s: float | None = None
    num_left_behind: int = 0
    complaints: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """Remarks that are no complaints."""
    folder: str = ""


def judge(
    case: Case, scenario: Scenario, seen: Observation, reference: Mapping[int, str]
) -> Result:
    """The row of one run."""
    expected, topology = scenario.expected, scenario.topology
    detection = _detection(expected, seen)
    detected_s = None
    if detection is not None and seen.fault_s is not None:
        detected_s = detection.at_s - seen.fault_s
    resumed_s = _resumed_s(seen, detection)
    wrong = _wrong_chunks(seen, reference)
    error_s = {failure.rank: failure.at_s - _began_s(seen) for failure in seen.failures}
    has_happened = _has_happened(scenario, seen)
    complaints = [
        *_ends_complaints(expected, seen),
        *([] if seen.is_hung else _code_complaints(seen)),
        *([] if has_happened else ["the fault did not happen"]),
        *_detection_complaints(expected, seen),
        *_chunk_complaints(expected, seen, wrong),
        *_resume_complaints(expected, resumed_s),
    ]
    if seen.left_behind:
        complaints.append(f"processes left behind: {seen.left_behind}")
    if not seen.is_hung:
        complaints += scenario.check(seen)
    return Result(
        number=case.number,
        name=case.name,
        description=case.description,
        plan=str(topology.plan_id),
        tp=topology.tp_degree,
        expected=expected.headline,
        verdict=_verdict(expected, seen, wrong, complaints),
        is_unharmed=expected.is_unharmed,
        has_happened=has_happened,
        ends=tuple(seen.end_of(rank) for rank in range(seen.num_ranks)),
        sentences=tuple(f"rank {e.rank}: {e.error}: {e.text}" for e in seen.failures),
        detected_s=detected_s,
        detected_chunks=_detected_chunks(seen, detection),
        error_s=tuple(error_s.get(rank) for rank in range(seen.num_ranks)),
        num_chunks=len(seen.emitted),
        num_wrong=len(wrong),
        resumed_s=resumed_s,
        num_left_behind=len(seen.left_behind),
        complaints=tuple(complaints),
        folder=seen.job.folder,
    )


def not_run(case: Case, topology: Topology, why: str) -> Result:
    """The row of a case that cannot be tried here."""
    return Result(
        number=case.number,
        name=case.name,
        description=case.description,
        plan=str(topology.plan_id),
        tp=topology.tp_degree,
        expected="",
        verdict=Verdict.NOT_RUN,
        notes=(why,),
    )


def _verdict(
    expected: Expected, seen: Observation, wrong: list[Event], complaints: list[str]
) -> Verdict:
    if len(wrong) > expected.most_wrong:
        return Verdict.DRIFTED
    if seen.is_hung:
        return Verdict.HUNG
    return Verdict.FAILED if complaints else Verdict.PASSED


def _has_happened(scenario: Scenario, seen: Observation) -> bool:
    """A fault that is a setting happens when every rank has come with it."""
    if scenario.faults or scenario.cuts_connection:
        return bool(seen.happened)
    return len({e.rank for e in seen.of(EventKind.OPENING, attempt=0)}) == seen.num_ranks


def _detection(expected: Expected, seen: Observation) -> Event | None:
    """The first error that was expected of its rank."""
    hits = [failure for failure in seen.failures if failure.error in expected.ends[failure.rank]]
    return min(hits, key=lambda failure: failure.at_s, default=None)


def _detected_chunks(seen: Observation, detection: Event | None) -> int | None:
    """From the fault to the chunk that its error names."""
    named = None if detection is None else re.search(r"\bchunk (\d+)", detection.text)
    return int(named[1]) - seen.happened[0].chunk if named and seen.happened else None


def _resumed_s(seen: Observation, detection: Event | None) -> float | None:
    """From the detection, or the end of what had caused it, to the next chunk."""
    again = [event.at_s for event in seen.emitted if event.attempt > 0]
    if detection is None or not again:
        return None
    return again[0] - max([detection.at_s, *(e.at_s for e in seen.of(EventKind.RESTORED))])


def _wrong_chunks(seen: Observation, reference: Mapping[int, str]) -> list[Event]:
    """Chunks that a clean run does not have, or of an epoch that a newer one had replaced."""
    wrong, newest = [], -1
    for event in seen.events:
        if event.kind is EventKind.EMITTED:
            is_clean = event.sha256 == reference.get(event.chunk)
            if not is_clean or event.epoch < newest:
                wrong.append(event)
        if event.kind in (EventKind.EMITTED, EventKind.CUT):
            newest = max(newest, event.epoch)
    return wrong


def _ends_complaints(expected: Expected, seen: Observation) -> list[str]:
    return [
        f"rank {rank}: {seen.end_of(rank)}, want {' or '.join(sorted(allowed))}"
        for rank, allowed in enumerate(expected.ends)
        if seen.end_of(rank) not in allowed
    ]


def _code_complaints(seen: Observation) -> list[str]:
    """A process ends as its rank logged, unless the launcher had to end it."""
    complaints, first_s = [], dict[int, float]()
    for end in seen.of(EventKind.ENDED):
        how = LEFT if end.rank < 0 else seen.end_of(end.rank, attempt=end.attempt)
        if end.code:
            first_s.setdefault(end.attempt, end.at_s)
        is_late = end.code and end.at_s >= first_s[end.attempt] + LINGER_S
        if is_late and end.code in (-signal.SIGTERM, -signal.SIGKILL):
            continue
        if end.code not in _CODES.get(how, _ERRED):
            name = end.text or f"rank {end.rank} of attempt {end.attempt}"
            complaints.append(f"{name}: {how}, and its exit code was {end.code}")
    return complaints


def _detection_complaints(expected: Expected, seen: Observation) -> list[str]:
    complaints = []
    for failure in seen.failures:
        error_s = failure.at_s - _began_s(seen)
        if error_s > expected.within_s:
            late = f"rank {failure.rank} reported it after {error_s:.1f} s"
            complaints.append(f"{late}, want {expected.within_s:g} s")
        pattern = expected.names.get(failure.rank, "")
        if not re.search(pattern, failure.text):
            complaints.append(f"rank {failure.rank} says {failure.text!r}, want {pattern!r}")
    return complaints


def _began_s(seen: Observation) -> float:
    """When the fault happened, or else when the run began."""
    return seen.fault_s or seen.began_s


def _chunk_complaints(expected: Expected, seen: Observation, wrong: list[Event]) -> list[str]:
    """Every chunk once, in order; a live hard cut may leave out what it dropped."""
    complaints = []
    if len(wrong) > expected.most_wrong:
        complaints.append(f"wrong chunks: {[event.chunk for event in wrong]}")
    indices = [event.chunk for event in seen.emitted]
    cuts = [event.chunk for event in seen.of(EventKind.CUT)]
    if indices != sorted(set(indices)):
        complaints.append(f"chunks came as {indices}")
    for before, after in zip([-1, *indices], indices, strict=False):
        if after > before + 1 and after not in cuts:
            complaints.append(f"no chunk between {before} and {after}")
    if expected.completes and len(indices) != seen.job.script.num_chunks:
        complaints.append(f"{len(indices)} of {seen.job.script.num_chunks} chunks")
    return complaints


def _resume_complaints(expected: Expected, resumed_s: float | None) -> list[str]:
    if not expected.resumes:
        return []
    if resumed_s is None:
        return ["the stream did not resume"]
    late = resumed_s > RESUME_S
    return [f"resumed after {resumed_s:.1f} s, want {RESUME_S:g} s"] if late else []
