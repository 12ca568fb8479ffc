"""The ranks of one attempt after another: who runs, who failed, and who is signalled when.

Everything that happens comes through one queue, in order; every wait for ranks to end has a bound,
after which they are sent SIGTERM, and at last SIGKILL.
"""

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import FrameType

from scope_rt.environment_names import AFTER_WRONG, UNSAID
from scope_rt.mesh.rendezvous import named
from scope_runners.exit_codes import BAD_INPUT, DISK_FULL, INTEGRITY, RETRACTED
from scope_runners.fork_server import (
    TERMINATE_S,
    Event,
    ForkServer,
    ForkServerEnded,
    RankEnded,
    RankStarted,
    is_stopped,
)

LINGER_S = 1.5
"""After a rank failed, how long its peers may still say what they saw."""
ORDERLY_END_S = 15.0
"""How long an orderly end may take, once rank0 has reached it."""
_LOOK_S = 1.0
"""How often to look, at least, whether the fork server or all ranks were stopped."""
_PATIENCE = 0.8
"""The part of the heartbeat's bound after which stopped ranks are ended, as ranks do it."""
_LOG = logging.getLogger(__name__)


def _nothing_more(rank: int) -> Mapping[str, str]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What one start of the group runs."""

    argv: Sequence[str]
    num_ranks: int
    environ_of: Callable[[int], Mapping[str, str]] = _nothing_more
    """Variables for single ranks, beside those that all have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What ended an attempt."""

    rank: int
    code: int
    """As a shell counts."""
    is_final: bool
    """Another attempt would end the same way, or is not wanted."""

    is_wrong: bool = False
    """Whether a rank found something computed wrong, be it after another one was lost."""
    stopped: tuple[int, ...] = ()
    """Ranks that were stopped (SIGSTOP) when the first one ended: it ended because of them."""
    is_unsaid: bool = False
    """Whether rank0 ended otherwise, and may not have retracted what that speaks against."""

    @property
    def told(self) -> str:
        """What ranks of the next start find in `SCOPE_AFTER_INTEGRITY_ERROR`."""
        return UNSAID if self.is_unsaid else str(int(self.is_wrong))

    def __str__(self) -> str:
        if self.code > 128:
            return f"rank {self.rank} ended by {signal.Signals(self.code - 128).name}"
        if self.code == INTEGRITY:
            return f"rank {self.rank} was the first to end by an error of integrity"
        if self.stopped:
            were = "was" if len(self.stopped) == 1 else "were"
            return f"{named(self.stopped)} {were} stopped (SIGSTOP)"
        return f"rank {self.rank} was the first to fail"


class RankGroup:
    """The ranks of one attempt after another, and what happens to them, in order."""

    def __init__(
        self,
        module: str,
        environ: Mapping[str, str],
        on_event: Callable[[int, Event], None],
        *,
        heartbeat_timeout_s: float,
        chunk_timeout_s: float = 0.0,
    ) -> None:
        """`chunk_timeout_s` is how long rank0 may go on with its work, once it was asked to end,
        before its end must be orderly."""
        self._module, self._environ, self._on_event = module, environ, on_event
        self._most_stopped_s = _PATIENCE * heartbeat_timeout_s
        self._chunk_timeout_s = chunk_timeout_s
        # Its put may interrupt its get, so a signal handler may call it.
        self._events: SimpleQueue[Event | signal.Signals] = SimpleQueue()
        self._server: ForkServer | None = None
        self._stopped_by: signal.Signals | None = None
        self._running: set[int] = set()
        self._pids: dict[int, int] = {}
        self._failed: list[RankEnded] = []
        self._stopped: tuple[int, ...] = ()
        self._num_unprompted: int | None = None
        self._deadline_s: float | None = None
        self._signals_left: list[signal.Signals] = []

    def ask_to_stop(self, signum: int, frame: FrameType | None) -> None:
        """The handler of signals to the launcher."""
        self._events.put(signal.Signals(signum))

    def run(
        self, number: int, attempt: Attempt, *, restarts_left: int, before: Failure | None
    ) -> Failure | None:
        """Run one attempt; returns when none of its ranks runs any more.

        `before` is what ended the one before.
        """
        after_wrong = "0" if before is None else before.told
        self._start(number, attempt, last=number + restarts_left, after_wrong=after_wrong)
        rank0_is_done = False
        while self._running:
            event = self._next_event()
            if not isinstance(event, signal.Signals | None):
                self._on_event(number, event)
            match event:
                case RankStarted(rank, pid):
                    _LOG.info("attempt %d: rank %d is process %d", number, rank, pid)
                    self._pids[rank] = pid
                    if rank == 0 and self._stopped_by is not None:
                        self._signal(self._stopped_by, {0})
                case RankEnded(rank, code):
                    _LOG.info("attempt %d: rank %d ended with %d", number, rank, code)
                    self._running.discard(rank)
                    rank0_is_done |= rank == 0 and code in (0, RETRACTED)
                    if code and not (rank == 0 and rank0_is_done):
                        restarts = restarts_left > 0 and self._stopped_by is None
                        self._fail(event, at_once=restarts and not rank0_is_done)
                    elif rank == 0:
                        self._failed += [event] if code else []
                        self._bound(ORDERLY_END_S)
                case ForkServerEnded(code):
                    self._lose_server(code)
                case signal.Signals() as signum:
                    self._stop(signum)
                case None:
                    if not self._escalate():
                        break
        return self._failure(is_final=rank0_is_done or bool(self._running))

    def close(self) -> None:
        """End what still runs, at once."""
        self._signal(signal.SIGKILL, self._running)
        if self._server is not None:
            self._server.close()

    def _start(self, number: int, attempt: Attempt, *, last: int, after_wrong: str) -> None:
        if self._server is None:
            self._server = ForkServer(self._module, self._environ, report=self._events.put)
        self._running = set(range(attempt.num_ranks))
        self._pids, self._failed, self._stopped = {}, [], ()
        self._num_unprompted = self._deadline_s = None
        self._signals_left = [signal.SIGTERM, signal.SIGKILL]
        shared = {
            "WORLD_SIZE": str(attempt.num_ranks),
            "TORCHELASTIC_RESTART_COUNT": str(number),
            "TORCHELASTIC_MAX_RESTARTS": str(last),
            AFTER_WRONG: after_wrong,
        }
        for rank in range(attempt.num_ranks):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            self._server.start(rank, attempt.argv, shared | place | {**attempt.environ_of(rank)})

    def _next_event(self) -> Event | signal.Signals | None:
        """The next event; None when the deadline comes first."""
        server_stopped_s = ranks_stopped_s = 0.0
        while True:
            left_s = min(_LOOK_S, self._most_stopped_s / 8)
            if self._deadline_s is not None:
                left_s = min(left_s, max(0.0, self._deadline_s - time.monotonic()))
            try:
                return self._events.get(timeout=left_s)
            except Empty:
                if self._deadline_s is not None and time.monotonic() >= self._deadline_s:
                    return None
            server = self._server
            is_server_stopped = server is not None and is_stopped(server.pid)
            server_stopped_s = server_stopped_s + left_s if is_server_stopped else 0.0
            if server and server_stopped_s >= TERMINATE_S:
                server.kill()
            ranks_stopped_s = ranks_stopped_s + left_s if self._all_are_stopped() else 0.0
            if ranks_stopped_s >= self._most_stopped_s:
                self._end_stopped(ranks_stopped_s)
                ranks_stopped_s = 0.0

    def _all_are_stopped(self) -> bool:
        """Whether no rank is left that could say of the others that they are silent."""
        if self._stopped_by is not None or not self._running <= self._pids.keys():
            return False
        return all(is_stopped(self._pids[rank]) for rank in self._running)

    def _end_stopped(self, stopped_s: float) -> None:
        _LOG.error(
            "%s: stopped (SIGSTOP) for %.1f s, and no rank runs; ending them",
            named(sorted(self._running)),
            stopped_s,
        )
        self._signal(signal.SIGKILL, self._running)

    def _bound(self, seconds: float) -> None:
        """Signal what still runs in `seconds`, or earlier where that was already decided."""
        deadline_s = time.monotonic() + seconds
        self._deadline_s = min(deadline_s, self._deadline_s or deadline_s)

    def _fail(self, end: RankEnded, *, at_once: bool) -> None:
        """Let the peers say what they saw, then end them: `at_once` where all will start again."""
        if not self._failed:
            known = sorted(self._running & self._pids.keys())
            self._stopped = tuple(rank for rank in known if is_stopped(self._pids[rank]))
        self._failed.append(end)
        if self._stopped_by is not None and 0 in self._running:
            return  # rank0 ends the stream in order, for which it has its time
        # What was computed wrong must not be resumed from: rank0 has time to write that down.
        rank0_retracts = end.code == INTEGRITY and 0 in self._running
        if len(self._failed) > 1:
            if end.rank == 0:
                self._bound(TERMINATE_S)  # nothing is left to finish the stream
            elif rank0_retracts:  # a survivor of a loss has found it
                self._deadline_s = time.monotonic() + ORDERLY_END_S
            return
        self._bound(ORDERLY_END_S if rank0_retracts else LINGER_S)
        if at_once:
            self._signals_left = [signal.SIGKILL]
        elif end.code < 0 and self._stopped_by is None:
            name = signal.Signals(-end.code).name
            _LOG.warning("rank %d ended by %s; stopping the other ranks", end.rank, name)

    def _failure(self, *, is_final: bool) -> Failure | None:
        """What ended the attempt: a signal from outside rather than what others made of it.

        Ranks that were ended because a person asked for it count as ended by that signal.
        """
        if self._running:
            code = 128 + (self._stopped_by or signal.SIGKILL)
            return Failure(rank=min(self._running), code=code, is_final=True)
        if not self._failed:
            return None
        unprompted = self._failed[: self._num_unprompted]
        found = {end.rank for end in self._failed if end.code == INTEGRITY}
        killed = [end for end in unprompted if end.code < 0]
        cause = (killed or self._failed)[0]
        obeyed = cause.code in (BAD_INPUT, DISK_FULL, RETRACTED) or cause.code > 128
        code = cause.code if cause.code > 0 else 128 - cause.code
        if cause.code < 0 and not killed and self._stopped_by is not None:
            code = 128 + self._stopped_by
        return Failure(
            rank=cause.rank,
            code=code,
            is_final=is_final or obeyed or self._stopped_by is not None,
            stopped=self._stopped,
            is_wrong=bool(found),
            is_unsaid=bool(found) and 0 not in found,
        )

    def _lose_server(self, code: int) -> None:
        """Nothing would be reported of the ranks any more: end them, and count them as ended."""
        self._signal(signal.SIGKILL, self._running)
        for rank in self._running:
            is_new = rank not in self._pids
            self._events.put(RankEnded(rank, code or 1 if is_new else -signal.SIGKILL))
        if self._server is not None:
            self._server.close()
            self._server = None

    def _stop(self, signum: signal.Signals) -> None:
        """Hand the first signal to rank0, which ends the stream in order; obey the second now."""
        if self._stopped_by is not None:
            self._signals_left = [signal.SIGKILL]
            self._bound(0.0)
            return
        self._stopped_by = signum
        self._bound(self._chunk_timeout_s + ORDERLY_END_S)
        self._signal(signum, {0})

    def _escalate(self) -> bool:
        """Send SIGTERM, later SIGKILL; False when even that is spent."""
        if not self._signals_left:
            return False
        if self._num_unprompted is None:
            self._num_unprompted = len(self._failed)
        signum = self._signals_left.pop(0)
        if signum == signal.SIGKILL and self._stopped_by is not None and self._running:
            _LOG.warning(
                "killing %s: not ended since it was asked to", named(sorted(self._running))
            )
        self._signal(signum, self._running)
        patience_s = TERMINATE_S
        if signum == signal.SIGTERM and self._may_finish():
            patience_s = ORDERLY_END_S
        self._deadline_s = time.monotonic() + patience_s
        return True

    def _may_finish(self) -> bool:
        """Whether rank0 may be finishing the video, which others' failure must not cut short."""
        pid = self._pids.get(0) if 0 in self._running else None
        return pid is not None and self._stopped_by is None and not is_stopped(pid)

    def _signal(self, signum: signal.Signals, ranks: Set[int]) -> None:
        for rank in ranks & self._running & self._pids.keys():
            with suppress(ProcessLookupError):  # only where the fork server is gone
                os.kill(self._pids[rank], signum)
