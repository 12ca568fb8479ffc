"""What was observed of a run; nothing here knows what should have happened."""

from collections.abc import Sequence
from dataclasses import dataclass

from scope_contracts.log_file import LogReader
from scope_contracts.log_records import Dropped, Finished, Record
from scope_runners.break_it.events import Event, EventKind
from scope_runners.break_it.faults import InjectedFault
from scope_runners.break_it.job import RankJob

LEFT, KILLED, STOPPED, SILENT = "left", "killed", "stopped", "silent"
"""Ends that are not errors: in order, by the fault (two), and without any log entry."""
_FATAL = {"kill": KILLED, "kill_in_message": KILLED, "stop": STOPPED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One run, all attempts of it. Times are of the monotonic clock."""

    job: RankJob
    num_ranks: int
    events: tuple[Event, ...]
    happened: tuple[InjectedFault, ...]
    began_s: float
    ended_s: float
    is_hung: bool
    """The run did not end by itself within its bound."""
    left_behind: tuple[int, ...]
    """Processes that outlived the run."""

    def of(self, kind: EventKind, *, attempt: int | None = None) -> list[Event]:
        """The events of one kind, in order."""
        return [e for e in self.events if e.kind is kind and attempt in (None, e.attempt)]

    @property
    def length_s(self) -> float:
        """From its start to the end of its last process."""
        return self.ended_s - self.began_s

    @property
    def emitted(self) -> list[Event]:
        return self.of(EventKind.EMITTED)

    @property
    def failures(self) -> list[Event]:
        """The errors of the first attempt, in order."""
        return self.of(EventKind.FAILED, attempt=0)

    @property
    def notes(self) -> list[str]:
        return [event.text for event in self.of(EventKind.NOTED)]

    @property
    def fault_s(self) -> float | None:
        """When the fault happened; if it is a setting, when the last rank started with it."""
        if self.happened:
            return self.happened[0].at_s
        opened = self.of(EventKind.OPENING, attempt=0)
        return max((event.at_s for event in opened), default=None)

    @property
    def resumed_at(self) -> tuple[int, ...]:
        """The chunks whose cache was rebuilt because the group was restarted."""
        ready = [event for event in self.of(EventKind.READY) if event.rank == 0]
        return tuple(event.chunk for event in ready if event.chunk >= 0)

    def end_of(self, rank: int, *, attempt: int = 0) -> str:
        """How an attempt of a rank ended: its error's class, or one of the ends above."""
        for failure in self.of(EventKind.FAILED, attempt=attempt):
            if failure.rank == rank:
                return failure.error
        if any(event.rank == rank for event in self.of(EventKind.LEFT, attempt=attempt)):
            return LEFT
        fatal = [
            _FATAL[h.action]
            for h in self.happened
            if h.rank == rank and h.attempt == attempt and h.action in _FATAL
        ]
        return fatal[0] if fatal else SILENT

    def recorded(self) -> Sequence[Record]:
        """The whole records of the run's recording."""
        with self.job.recording.open("rb") as file:
            return [entry.record for entry in LogReader(file)]


def recorded_chunks(seen: Observation) -> list[int]:
    """The chunks a recording has as finished."""
    return [record.chunk_index for record in seen.recorded() if isinstance(record, Finished)]


def dropped_chunks(seen: Observation) -> list[int]:
    """The chunks a recording has as dropped by a hard cut."""
    return [record.chunk_index for record in seen.recorded() if isinstance(record, Dropped)]


def seconds_per_chunk(seen: Observation) -> float:
    """Mean time between two chunks, without the first."""
    times = [event.at_s for event in seen.emitted][1:]
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
