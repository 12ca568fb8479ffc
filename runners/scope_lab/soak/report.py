"""The outcome of a soak: figures for a person, JSON for a program, complaints for both."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scope_lab.soak import chunks, memory, recovery, video
from scope_lab.soak.event_log import Complaint, CueLost, CueShown, EventLog, Line, MemorySampled
from scope_lab.soak.fault_injector import faults_inside
from scope_lab.soak.job import SoakJob
from scope_lab.soak.memory import Growth, growths
from scope_lab.soak.recovery import Incident, Percentiles
from scope_lab.soak.schedule import FaultKind
from scope_runners.wording import counted

_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultFigures:
    """The faults of one kind that happened; seconds from the fault."""

    kind: str
    count: int
    noticed_s: Percentiles
    recovered_s: Percentiles
    """To the next new chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakReport:
    """What a soak has shown. It passed exactly if there are no complaints."""

    passed: bool
    complaints: tuple[str, ...]
    plan: str
    tp: int
    seed: int
    video_minutes: float
    wall_minutes: float
    chunks_shown: int
    chunks_dropped: int
    """By live hard cuts, as they must be."""
    chunks_shown_again: int
    """After a restart, to a consumer that did not hold them yet."""
    chunks_planned_again: int
    """After a restart, because they had been under way."""
    epochs: int
    cues_asked: int
    cues_seen: int
    cues_lost: int
    """Acknowledged, then lost in a crash, and asked for again."""
    attempts: int
    faults_planned: int
    faults: tuple[FaultFigures, ...]
    restart_s: Percentiles
    """From the first sign of a loss to the next new chunk."""
    memory: tuple[Growth, ...]
    chunks_replayed: int
    largest_diff: float

    def to_json(self) -> str:
        """One object; whatever is a count of seconds or bytes says so."""
        return json.dumps(asdict(self), indent=2)


def report(
    job: SoakJob,
    *,
    code: int,
    left_behind: Sequence[int],
    replayed: Mapping[str, Any] | None,
) -> SoakReport:
    """Judge what lies in the folder of `job`.

    `code` is what its last launcher returned, `left_behind` are processes that outlived it, and
    `replayed` is the report of a replay of its recording, None where there could be none.
    """
    lines, schedule = list(EventLog(job.event_log).read().new()), job.schedule
    compared = chunks.compare(lines, job.recording, num_chunks=job.num_chunks)
    timeline, last = recovery.Timeline(lines), max(line.attempt for line in lines)
    inside = faults_inside(job, schedule.faults)
    found = recovery.incidents(schedule.faults, lines, inside, timeline)
    again = recovery.restarts(timeline)
    seen = {line.cue for line in lines if isinstance(line, CueShown)}
    grown = growths(line for line in lines if isinstance(line, MemorySampled))
    complaints = (
        *([f"the launcher ended with {code}"] if code else []),
        *([f"processes {list(left_behind)} were left behind"] if left_behind else []),
        *(line.text for line in lines if isinstance(line, Complaint)),
        *compared.complaints,
        *([] if code else video.complaints(job.video, compared.chunks)),
        *recovery.complaints(found, timeline, again, last_attempt=last),
        *recovery.untried(
            schedule.faults, found, last_recompute=max(compared.recomputed, default=-1)
        ),
        *(f"cue {c.number} was never seen" for c in schedule.cues if c.number not in seen),
        *memory.complaints(grown, stream_s=job.num_chunks * job.chunk_s),
        *_replay(replayed, num_chunks=len(compared.chunks)),
    )
    return SoakReport(
        passed=not complaints,
        complaints=complaints,
        plan=job.plan,
        tp=job.tp,
        seed=job.seed,
        video_minutes=len(compared.chunks) * job.chunk_s / 60,
        wall_minutes=_span_s(lines) / 60,
        chunks_shown=len(compared.chunks),
        chunks_dropped=len(compared.dropped),
        chunks_shown_again=compared.num_again,
        chunks_planned_again=compared.num_lost,
        epochs=1 + max((chunk.cache_epoch for chunk in compared.chunks), default=-1),
        cues_asked=len(schedule.cues),
        cues_seen=len(seen),
        cues_lost=sum(isinstance(line, CueLost) for line in lines),
        attempts=last + 1,
        faults_planned=len(schedule.faults),
        faults=tuple(_figures(found)),
        restart_s=Percentiles.of(restart.seconds for restart in again),
        memory=tuple(grown),
        chunks_replayed=0 if replayed is None else replayed["compared"],
        largest_diff=0.0 if replayed is None else replayed["largest_diff"],
    )


def table(outcome: SoakReport) -> str:
    """The report for a person at a terminal."""
    out = outcome
    again = f"{out.chunks_shown_again} shown again and {out.chunks_planned_again} planned again"
    lines = [
        f"stream     {out.video_minutes:.1f} min of video in {out.wall_minutes:.1f} min, "
        f"{out.plan} tp {out.tp}, seed {out.seed}",
        f"chunks     {out.chunks_shown} shown; {out.chunks_dropped} dropped by live cuts",
        f"           {again} after restarts",
        f"control    {out.cues_asked} cues, {out.cues_seen} seen, {out.cues_lost} lost in a "
        f"crash and asked again; {counted(out.epochs, 'epoch')}",
        f"replay     {out.chunks_replayed} chunks, largest difference {out.largest_diff:.2g}",
        f"restarts   {out.attempts - 1}; first new chunk after {_seconds(out.restart_s)}",
        "",
        f"{'fault':<14}{'count':>6}   {'noticed p50/p95/max s':<24}{'recovered p50/p95/max s'}",
        *(
            f"{f.kind:<14}{f.count:>6}   {_seconds(f.noticed_s):<24}{_seconds(f.recovered_s)}"
            for f in out.faults
        ),
        "",
        f"{'memory':<28}{'median MiB':>12}{'MiB/hour':>10}{'growth MiB':>12}   watched",
        *(
            f"{g.process:<28}{g.median_bytes / _MIB:>12.1f}{g.slope_per_hour / _MIB:>10.1f}"
            f"{g.growth_bytes / _MIB:>12.1f}   {g.seen_s / 60:.1f} min, {g.num_samples} samples"
            for g in out.memory
        ),
        "",
    ]
    verdict = [f"FAILED     {sentence}" for sentence in out.complaints]
    passed = f"passed     nothing lost, nothing left; flat memory: {memory.watched(out.memory)}"
    return "\n".join([*lines, *(verdict or [passed])])


def _seconds(seconds: Percentiles) -> str:
    return f"{seconds.p50:.2f} / {seconds.p95:.2f} / {seconds.most:.2f}"


def _figures(found: Sequence[Incident]) -> Iterator[FaultFigures]:
    for kind in FaultKind:
        own = [incident for incident in found if incident.fault.kind is kind]
        if own:
            yield FaultFigures(
                kind=kind,
                count=len(own),
                noticed_s=Percentiles.of(i.noticed_s for i in own if i.noticed_s is not None),
                recovered_s=Percentiles.of(i.recovered_s for i in own if i.recovered_s is not None),
            )


def _replay(replayed: Mapping[str, Any] | None, *, num_chunks: int) -> list[str]:
    if replayed is None:
        return ["the recording could not be replayed"]
    if not replayed["passed"]:
        return [f"the replay differs, first in {replayed['differences'][0]}"]
    if replayed["compared"] != num_chunks:
        return [f"the replay has compared {replayed['compared']} of {num_chunks} chunks"]
    return []


def _span_s(lines: Sequence[Line]) -> float:
    times = [line.at_s for line in lines]
    return max(times) - min(times)
