"""Every fault of the schedule comes once, when it is due, whatever the ranks are doing then.

One from inside travels with the ranks and happens there; one from outside is a signal. The same
thread samples the memory of all processes, and gives up a soak that makes no more progress.
"""

import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from scope_lab.soak.event_log import (
    AttemptLog,
    Complaint,
    Ended,
    EventLog,
    FaultInjected,
    Launched,
    Line,
    MemorySampled,
    Shown,
)
from scope_lab.soak.job import SoakJob
from scope_lab.soak.memory import FORK_SERVER, LAUNCHER, parent_of, rss_bytes
from scope_lab.soak.schedule import FaultKind, PlannedFault
from scope_runners.break_it.faults import FaultPlan, InjectedFault, encode, read_log
from scope_runners.break_it.instruments import FAULTS
from scope_runners.fork_server import Event, RankEnded, RankStarted

STALL_S = 90.0
"""A soak without a new chunk for so long has failed."""
ASK_S = 1.0
"""From the first request to end to the second, which is obeyed at once."""
_LAST_CHUNKS = 3
_TICK_S = 0.05
_SAMPLE_S = 2.0
_SIGNALS = {
    FaultKind.KILL: signal.SIGKILL,
    FaultKind.KILL_AGAIN: signal.SIGKILL,
    FaultKind.STOP: signal.SIGSTOP,
    FaultKind.PAUSE: signal.SIGSTOP,
}


def faults_inside(job: SoakJob, faults: Sequence[PlannedFault]) -> dict[int, tuple[int, float]]:
    """The faults from inside that have happened, by number: in which attempt, and when."""
    first = dict[int, tuple[int, float]]()
    for attempt, log in job.injected_logs():
        given = [fault for fault in faults if fault.injected and fault.number not in first]
        counts = Counter[int]()
        for line in read_log(log.read_text().splitlines()):
            cause = next((f for f in given if _explains(f, line, counts[f.number])), None)
            if cause is not None:
                counts[cause.number] += 1
                first.setdefault(cause.number, (attempt, line.at_s))
    return first


def _explains(fault: PlannedFault, line: InjectedFault, count: int) -> bool:
    inside = fault.injected
    assert inside is not None
    same = (inside.action, inside.rank, inside.point) == (line.action, line.rank, line.point)
    return same and inside.chunk <= line.chunk and count < inside.times


class FaultInjector:
    """Injects faults into the ranks of one launcher, from where an earlier one has ended.

    Args:
        lines: the event log so far.
        first_attempt: how many attempts earlier launchers have made.
    """

    def __init__(self, job: SoakJob, lines: Sequence[Line], *, first_attempt: int) -> None:
        self.has_given_up = False
        """Whether the stream made no more progress, so that the launcher was ended."""
        self._job, self._faults = job, job.schedule.faults
        self._first_attempt = first_attempt
        event_log = EventLog(job.event_log)
        self._log, self._reader = AttemptLog(event_log, attempt=first_attempt), event_log.read()
        broken = {line.fault for line in lines if isinstance(line, FaultInjected)}
        self._outside = deque(
            fault for fault in self._faults if fault.kind in _SIGNALS and fault.number not in broken
        )
        self._pids: dict[int, int] = {}
        self._num_shown = self._num_shown_in_attempt = 0
        self._due_s: float | None = None
        """When the next fault from outside comes, once it is due."""
        self._later: list[tuple[float, PlannedFault, signal.Signals]] = []
        """What is still to come of faults that have begun: when, and which signal."""
        self._progress_s = self._sampled_s = time.monotonic()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fault-injector", daemon=True)

    def start(self) -> None:
        """Begin to inject faults."""
        self._log.write(Launched)
        self._thread.start()

    def close(self) -> None:
        """Inject no more faults. That the thread has ended before is a complaint."""
        if not self._thread.is_alive():
            self._log.write(Complaint, text="the fault injector ended before the soak did")
        self._is_closed.set()
        self._thread.join(STALL_S)

    def environ(self, number: int) -> Mapping[str, str]:
        """What the ranks of the launcher's attempt `number` are given: their faults."""
        done = faults_inside(self._job, self._faults)
        faults = [f.injected for f in self._faults if f.injected and f.number not in done]
        plan = FaultPlan(
            faults=tuple(replace(fault, attempt=number) for fault in faults),
            log=str(self._job.injected_log(self._first_attempt + number)),
        )
        return {FAULTS: encode(plan)}

    def take(self, number: int, event: Event) -> None:
        """The launcher's events."""
        match event:
            case RankStarted(rank, pid):
                if self._log.attempt != self._first_attempt + number:
                    self._log.attempt = self._first_attempt + number
                    self._num_shown_in_attempt = 0
                self._pids[rank] = pid
            case RankEnded(rank, code):
                self._pids.pop(rank, None)
                self._log.write(Ended, rank=rank, code=code)

    def _run(self) -> None:
        while not self._is_closed.wait(_TICK_S):
            self._follow()
            now_s = time.monotonic()
            self._inject(now_s)
            if now_s - self._sampled_s >= _SAMPLE_S:
                self._sampled_s = now_s
                self._sample_memory()
            if now_s - self._progress_s >= STALL_S:
                self._give_up()

    def _give_up(self) -> None:
        self.has_given_up = True
        self._log.write(Complaint, text=f"no new chunk for {STALL_S:g} s; the soak was given up")
        os.kill(os.getpid(), signal.SIGTERM)  # asks rank0
        if not self._is_closed.wait(ASK_S):
            os.kill(os.getpid(), signal.SIGTERM)  # ends all ranks
            self._is_closed.wait()

    def _follow(self) -> None:
        """Read how far the stream is."""
        for line in self._reader.new():
            if isinstance(line, Shown):
                self._num_shown_in_attempt += line.attempt == self._log.attempt
                if line.number >= self._num_shown:
                    self._num_shown, self._progress_s = line.number + 1, time.monotonic()

    def _inject(self, now_s: float) -> None:
        for due in [due for due in self._later if due[0] <= now_s]:
            self._later.remove(due)
            self._signal(*due[1:])
        if not self._outside or self._outside[0].chunk > self._num_shown:
            return
        fault = self._outside[0]
        self._due_s = self._due_s or now_s + fault.delay_s
        # A stream that makes up for lost time might end before the delay does.
        is_ending = self._num_shown >= self._job.num_chunks - _LAST_CHUNKS
        if (now_s < self._due_s and not is_ending) or fault.rank not in self._pids:
            return
        self._outside.popleft()
        self._due_s = None
        self._signal(fault, _SIGNALS[fault.kind])
        if fault.lasts_s:
            more = signal.SIGCONT if fault.kind is FaultKind.PAUSE else signal.SIGKILL
            self._later.append((now_s + fault.lasts_s, fault, more))

    def _signal(self, fault: PlannedFault, signum: signal.Signals) -> None:
        pid = self._pids.get(fault.rank)
        if pid is not None:  # an ended rank keeps its id until its place is filled again
            if signum != signal.SIGCONT:
                self._log.write(FaultInjected, fault=fault.number, pid=pid)
            os.kill(pid, signum)

    def _sample_memory(self) -> None:
        pids = {LAUNCHER: os.getpid()} | dict(self._pids)
        parent = next((parent_of(pid) for pid in self._pids.values()), None)
        if parent is not None:
            pids[FORK_SERVER] = parent
        for rank, pid in pids.items():
            size = rss_bytes(pid)
            if size is not None:
                count = self._num_shown_in_attempt
                self._log.write(MemorySampled, rank=rank, rss_bytes=size, num_shown=count)
