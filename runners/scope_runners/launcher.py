"""The ranks of one machine live and die together, and none outlives its launcher.

Every rank's standard input is a pipe that only the launcher holds open: when the launcher is gone,
however it went, the pipe ends and the rank leaves. Ranks sit in sessions of their own, so a
terminal's Ctrl-C reaches the launcher alone, which hands it to rank0 to end the stream in order.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from queue import Empty, SimpleQueue
from types import FrameType

LINGER_S = 1.5
"""After a rank failed, how long its peers may still say what they saw."""
ORDERLY_END_S = 15.0
"""How long an orderly end may take, once rank0 was asked for it or has reached it."""
TERMINATE_S = 5.0
"""How long a rank may take to obey SIGTERM, and the kernel to carry out SIGKILL."""
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch(module: str, argv: Sequence[str], *, num_ranks: int, threads: int = 1) -> int:
    """Run `module.main(argv)` as `num_ranks` ranks; returns the first failing rank's exit code.

    A rank that a signal ended counts as 128 + signal, as in a shell.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads),
    }
    group = _Group()
    handlers = {signum: signal.signal(signum, group.ask_to_stop) for signum in _FORWARDED}
    try:
        for rank in range(num_ranks):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            group.start(module, argv, os.environ | shared | place)
        return group.wait()
    finally:
        group.kill()
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


@dataclass(frozen=True, slots=True)
class _Exit:
    rank: int
    code: int


class _Group:
    """The ranks and what happens to them, in order."""

    def __init__(self) -> None:
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._running: set[int] = set()
        # Its put may interrupt its get, so a signal handler may call it.
        self._events: SimpleQueue[_Exit | signal.Signals] = SimpleQueue()
        self._deadline_s: float | None = None
        self._signals_left = [signal.SIGTERM, signal.SIGKILL]
        self._stopping = False

    def start(self, module: str, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start the next rank."""
        rank = len(self._ranks)
        # -P: a file in the working folder must not shadow a library, as it does not in ours.
        command = [sys.executable, "-P", "-m", __spec__.name, module, *argv]
        process = subprocess.Popen(
            command, env=environ, stdin=subprocess.PIPE, start_new_session=True
        )
        self._ranks.append(process)
        self._running.add(rank)
        threading.Thread(
            target=lambda: self._events.put(_Exit(rank, process.wait())), daemon=True
        ).start()

    def ask_to_stop(self, signum: int, frame: FrameType | None) -> None:
        """The handler of signals to the launcher."""
        self._events.put(signal.Signals(signum))

    def wait(self) -> int:
        """Return when no rank runs any more."""
        first_failure = 0
        while self._running:
            match self._next_event():
                case _Exit(rank, code):
                    self._running.discard(rank)
                    if code and not first_failure:
                        first_failure = self._fail(rank, code)
                    elif rank == 0 and not code:
                        self._bound(ORDERLY_END_S)
                case signal.Signals() as signum:
                    self._stop(signum)
                case None:
                    if not self._escalate():
                        return first_failure or 128 + signal.SIGKILL
        return first_failure

    def kill(self) -> None:
        """End what still runs, at once."""
        for rank in self._running:
            self._ranks[rank].kill()
        for process in self._ranks:
            process.wait(TERMINATE_S)
            assert process.stdin is not None
            process.stdin.close()

    def _next_event(self) -> _Exit | signal.Signals | None:
        """The next event; None when the deadline comes first."""
        left_s = None if self._deadline_s is None else self._deadline_s - time.monotonic()
        try:
            return self._events.get(timeout=None if left_s is None else max(0.0, left_s))
        except Empty:
            return None

    def _bound(self, seconds: float) -> None:
        """Signal what still runs in `seconds`, or earlier where that was already decided."""
        deadline_s = time.monotonic() + seconds
        self._deadline_s = min(deadline_s, self._deadline_s or deadline_s)

    def _fail(self, rank: int, code: int) -> int:
        self._bound(LINGER_S)
        if code > 0:
            return code
        if not self._stopping:
            name = signal.Signals(-code).name
            print(f"rank {rank}: ended by {name}; stopping the other ranks", file=sys.stderr)
        return 128 - code

    def _stop(self, signum: signal.Signals) -> None:
        """Hand the first signal to rank0, which ends the stream in order; obey the second now."""
        if self._stopping:
            self._signals_left = [signal.SIGKILL]
            self._bound(0.0)
            return
        self._stopping = True
        self._bound(ORDERLY_END_S)
        if 0 in self._running:
            self._ranks[0].send_signal(signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM)

    def _escalate(self) -> bool:
        """Send SIGTERM, later SIGKILL; False when even that is spent."""
        if not self._signals_left:
            return False
        signum = self._signals_left.pop(0)
        for rank in self._running:
            self._ranks[rank].send_signal(signum)
        self._deadline_s = time.monotonic() + TERMINATE_S
        return True


def _run_rank(module: str, argv: Sequence[str]) -> int:
    """What a rank's process runs: watch the launcher, then `module.main(argv)`."""
    threading.Thread(target=_leave_with_launcher, daemon=True).start()
    try:
        code: int = import_module(module).main(argv)
    except KeyboardInterrupt:  # while importing
        return 128 + signal.SIGINT
    return code


def _leave_with_launcher() -> None:
    """End this process when the launcher is gone, in order if the rank can still do so."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(TERMINATE_S)
    os._exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    raise SystemExit(_run_rank(sys.argv[1], sys.argv[2:]))
