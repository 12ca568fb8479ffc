"""Every fault that must be noticed is, within its bound, and the stream continues after it.

Only faults end an attempt, and no attempt ends without one.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scope_lab.soak.event_log import Ended, Failed, FaultInjected, Launched, Line, Opened, Shown
from scope_lab.soak.job import HEARTBEAT_S
from scope_lab.soak.schedule import FaultKind, PlannedFault
from scope_rt.faults import FaultPoint

RESUME_S = 15.0
"""How long a group may take from the first sign of a loss to its next new chunk."""
NOTICE_S = {FaultKind.STOP: HEARTBEAT_S}
"""How long a fault may go unnoticed in a group that runs; others:"""
DEAD_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A fault that happened; seconds from it, None where nothing followed."""

    fault: PlannedFault
    attempt: int
    at_s: float
    noticed_s: float | None
    """To the first sign of it: a rank's error, or the launcher's notice of an end."""
    recovered_s: float | None
    """To the next new chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """A restart that brought a new chunk, `seconds` after the last loss before it was noticed."""

    attempt: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Of seconds."""

    count: int
    p50: float
    p95: float
    most: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> "Percentiles":
        """Zeros where there are none."""
        ordered = sorted(seconds)
        if not ordered:
            return cls(count=0, p50=0.0, p95=0.0, most=0.0)
        return cls(
            count=len(ordered),
            p50=ordered[math.ceil(0.50 * len(ordered)) - 1],
            p95=ordered[math.ceil(0.95 * len(ordered)) - 1],
            most=ordered[-1],
        )


class Timeline:
    """When a soak moved and when it ended, in the order of the event log."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.new: list[tuple[int, float]] = []
        """New chunks: by which attempt, and when."""
        self.ends: dict[int, float] = {}
        """First sign of the end of an attempt."""
        self.errors: dict[int, str] = {}
        """The error of the attempt's first failing rank."""
        self.opened_s: dict[int, float] = {}
        self.launched: set[int] = set()
        """The attempts before these ended with their launcher, and a person went on."""
        num_shown = 0
        for line in sorted(lines, key=lambda line: line.at_s):
            match line:
                case Shown(number=number) if number >= num_shown:
                    num_shown = number + 1
                    self.new.append((line.attempt, line.at_s))
                case Failed(error=error, text=text):
                    self.ends.setdefault(line.attempt, line.at_s)
                    self.errors.setdefault(line.attempt, f"rank {line.rank}: {error}: {text}")
                case Launched(attempt=attempt):
                    self.launched.add(attempt)
                case Ended(code=code) if code:
                    self.ends.setdefault(line.attempt, line.at_s)
                case Opened():
                    self.opened_s[line.attempt] = line.at_s

    def next_new_s(self, *, attempt: int, after_s: float) -> float | None:
        """When the next new chunk came, from this attempt or a later one."""
        later = (at_s for by, at_s in self.new if by >= attempt and at_s >= after_s)
        return next(later, None)


def incidents(
    faults: Sequence[PlannedFault],
    lines: Sequence[Line],
    inside: dict[int, tuple[int, float]],
    timeline: Timeline,
) -> list[Incident]:
    """All faults that happened, in order."""
    places = [
        (line.fault, line.attempt, line.at_s) for line in lines if isinstance(line, FaultInjected)
    ]
    places += [(number, attempt, at_s) for number, (attempt, at_s) in inside.items()]
    return [
        _incident(faults[number], attempt, at_s, timeline)
        for number, attempt, at_s in sorted(places, key=lambda place: place[2])
    ]


def _incident(fault: PlannedFault, attempt: int, at_s: float, timeline: Timeline) -> Incident:
    end_s = timeline.ends.get(attempt) if fault.kind.is_fatal else at_s
    if end_s is None:
        return Incident(fault=fault, attempt=attempt, at_s=at_s, noticed_s=None, recovered_s=None)
    first = attempt + fault.kind.is_fatal  # the old ranks may yet show what was on its way
    next_s = timeline.next_new_s(attempt=first, after_s=at_s)
    return Incident(
        fault=fault,
        attempt=attempt,
        at_s=at_s,
        noticed_s=max(0.0, end_s - at_s),
        recovered_s=None if next_s is None else next_s - at_s,
    )


def restarts(timeline: Timeline) -> list[Restart]:
    """Those that brought a new chunk; an attempt before it may have brought none."""
    firsts = dict[int, float]()
    for attempt, at_s in timeline.new:
        firsts.setdefault(attempt, at_s)
    return [
        Restart(attempt=attempt, seconds=at_s - timeline.ends[attempt - 1])
        for attempt, at_s in firsts.items()
        if attempt - 1 in timeline.ends and attempt not in timeline.launched
    ]


def untried(
    faults: Sequence[PlannedFault], found: Sequence[Incident], *, last_recompute: int
) -> list[str]:
    """Faults that never happened; one inside a recompute waits for a restart, which may not come.

    Args:
        last_recompute: the last chunk that was planned with a recompute, -1 if none was.
    """
    if not faults:
        return ["no fault was planned; give more --minutes, or a shorter --fault-every"]
    happened = {incident.fault.number for incident in found}
    return [
        f"fault {fault.number} ({fault.kind} of rank {fault.rank}) did not happen"
        for fault in faults
        if fault.number not in happened and not _waits(fault, last_recompute)
    ]


def _waits(fault: PlannedFault, last_recompute: int) -> bool:
    inside = fault.injected
    return (
        inside is not None
        and inside.point is FaultPoint.RECOMPUTE
        and inside.chunk > last_recompute
    )


def complaints(
    found: Sequence[Incident], timeline: Timeline, again: Sequence[Restart], *, last_attempt: int
) -> list[str]:
    """What went otherwise than it must."""
    complaints = []
    for incident in found:
        fault = incident.fault
        name = f"fault {fault.number} ({fault.kind} of rank {fault.rank})"
        if incident.attempt + 1 in timeline.launched:
            continue  # the launcher was gone before it could do anything about it
        if incident.noticed_s is None:
            complaints.append(f"{name} was not noticed")
        elif incident.recovered_s is None:
            complaints.append(f"{name}: no chunk came after it")
        elif fault.kind.is_fatal and incident.at_s > timeline.opened_s.get(
            incident.attempt, math.inf
        ):
            bound_s = NOTICE_S.get(fault.kind, DEAD_S)
            if incident.noticed_s > bound_s:
                complaints.append(
                    f"{name} was noticed after {incident.noticed_s:.1f} s, not {bound_s:g}"
                )
    caused = {incident.attempt for incident in found if incident.fault.kind.is_fatal}
    caused |= {attempt - 1 for attempt in timeline.launched}
    for attempt in sorted(timeline.ends.keys() - caused):
        complaints.append(
            f"attempt {attempt} ended without a fault: {timeline.errors.get(attempt, '')}"
        )
    complaints += [
        f"attempt {restart.attempt} took {restart.seconds:.1f} s to its first chunk"
        for restart in again
        if restart.seconds > RESUME_S
    ]
    if last_attempt in timeline.ends:
        complaints.append(f"the last attempt failed: {timeline.errors.get(last_attempt, '')}")
    return complaints
