"""A run ends within its bound, or at once when this process is told to stop, and leaves nothing.

The launcher ends ranks that fail; it cannot know that ranks which still run will never end. It also
forwards a signal to rank0 for an orderly end, which a broken stream need not have.
"""

import io
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import Self

from scope_runners.break_it.events import EventKind, EventLog
from scope_runners.break_it.job import RankJob
from scope_runners.fork_server import Event, RankEnded, RankStarted
from scope_runners.launcher import Restarts, launch_attempts
from scope_runners.rank_group import Attempt

RANK_MODULE = "scope_runners.break_it.rank_main"
GONE_WITHIN_S = 5.0
"""How long a killed process may take to be gone."""
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class OverrunError(Exception):
    """A run that has overrun its bound is not started again."""


class Watch:
    """Kills the processes of a run when an attempt overruns `bound_s`, or when this process is told
    to stop. Only the main thread may use it.
    """

    def __init__(self, *, bound_s: float) -> None:
        self.has_overrun = False
        self.is_stopped = False
        self._bound_s = bound_s
        self._pids: set[int] = set()
        self._left_behind: set[int] = set()
        self._lock = threading.Lock()
        self._deadline_s = time.monotonic() + bound_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._wait, daemon=True)

    def __enter__(self) -> Self:
        self._wakeup_read, self._wakeup_write = os.pipe()
        os.set_blocking(self._wakeup_write, False)
        # Written for every signal, whatever handler it has.
        self._previous_wakeup = signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        signal.set_wakeup_fd(self._previous_wakeup)
        self._end_watch()
        self._thread.join(GONE_WITHIN_S)
        self._kill()
        for end in (self._wakeup_read, self._wakeup_write):
            os.close(end)

    def check(self) -> None:
        """Raises OverrunError when the run must not be started again."""
        if self.has_overrun or self.is_stopped:
            raise OverrunError

    def on_event(self, attempt: int, event: Event) -> None:
        """Take an event of the launcher."""
        if isinstance(event, RankStarted):
            self.add(event.pid)

    def add(self, pid: int) -> None:
        """A process of the run has started, and with it an attempt."""
        with self._lock:
            self._pids.add(pid)
            self._deadline_s = time.monotonic() + self._bound_s
        if self.has_overrun or self.is_stopped:
            self._kill()

    def note_survivors(self, living: Callable[[], Iterable[int]]) -> None:
        """Wait `GONE_WITHIN_S` at most; what still lives then was left behind."""
        deadline_s = time.monotonic() + GONE_WITHIN_S
        while (left := sorted(living())) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        self._left_behind |= set(left)

    def finish(self, started: Iterable[int]) -> tuple[int, ...]:
        """The run is over: the processes it left behind, of those seen here and of `started`."""
        self._end_watch()
        with self._lock:
            self._pids |= set(started)
        self.note_survivors(lambda: filter(_lives, self._pids))
        return tuple(sorted(self._left_behind))

    def _end_watch(self) -> None:
        self._is_over.set()
        os.write(self._wakeup_write, b"\0")

    def _wait(self) -> None:
        while True:
            left_s = max(0.0, self._deadline_s - time.monotonic())
            readable, _, _ = select.select([self._wakeup_read], [], [], left_s)
            signals = os.read(self._wakeup_read, 4096) if readable else b""
            self.is_stopped |= any(signum in signals for signum in _STOPS)
            self.has_overrun = not self._is_over.is_set() and time.monotonic() >= self._deadline_s
            if self.has_overrun or self.is_stopped:
                self._kill()
            if self.has_overrun or self._is_over.is_set():
                return

    def _kill(self) -> None:
        with self._lock:
            for pid in filter(_lives, self._pids):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def start_here(
    job: RankJob,
    attempt: Attempt,
    watch: Watch,
    *,
    most_restarts: int,
    launch: Callable[..., int] = launch_attempts,
) -> None:
    """Run the ranks of `job` to their end, as `scope-rt stream` would.

    Raises:
        KeyboardInterrupt: this process was told to stop.
    """
    printed = io.StringIO()

    def attempt_of(number: int) -> Attempt:
        watch.check()
        return attempt

    def see(number: int, event: Event) -> None:
        watch.on_event(number, event)
        if isinstance(event, RankEnded):
            log = EventLog(job.events, rank=event.rank, attempt=number)
            log.write(EventKind.ENDED, code=event.code)

    try:
        with suppress(OverrunError), redirect_stderr(printed):
            restarts = Restarts(most=most_restarts)
            launch(RANK_MODULE, attempt_of, restarts=restarts, on_event=see)
    finally:
        (Path(job.folder) / "launcher.txt").write_text(printed.getvalue())
    if watch.is_stopped:
        raise KeyboardInterrupt


def _lives(pid: int) -> bool:
    """Whether a process runs, or is stopped; a zombie does neither."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
