"""Ranks are forked from a process that has imported what they run: a start costs no import.

The fork server has one thread, reads its orders from the launcher, and reports which ranks started
and ended. An ended rank stays a zombie until its place is filled again, so its process id stands
for no other process while the launcher may still signal it. Standard input of the server and of
every rank is a pipe that only the launcher holds open: when the launcher is gone, however it went,
the pipe ends and they leave. A stopped process reads no pipe: the kernel continues a stopped server
when its launcher is gone, and kills the ranks when their server is.

Why this is not the `forkserver` of `multiprocessing` with `set_forkserver_preload`, tried on
Python 3.11 with `scope_runners.stream` and three ranks: it starts them no faster (warm, to the last
rank's first line: 17 to 21 ms, here 18 to 25; cold 1.3 to 1.4 s, here 1.4 to 1.9), and
- `Process.start` waits for the server's answer without a bound: with the server under SIGSTOP it
  had not returned after 20 s, where the launcher must end such a server and start again;
- it reaps a rank as soon as it ends, so that a signal to its process id may reach another process;
- when the server is killed, ranks that still run are reported as ended, with exit code 255;
- the server shares the launcher's process group, and with it a terminal's SIGHUP;
- an ImportError of what it preloads is swallowed, and every rank imports for itself;
- a rank still needs a thread that ends it with its launcher, and a second process, the resource
  tracker, stands beside the server.
What it does better is done here too: a rank ends without the interpreter's finalisation, which
takes a launched stream of two ranks 0.4 s of 6.5.
"""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import NoReturn

from scope_runners.parent_death import signal_at_parent_death

TERMINATE_S = 5.0
"""How long a process may take to obey SIGTERM, and the kernel to carry out SIGKILL."""
_GRACE_S = 0.5
_LEAVE = b"leave"


@dataclass(frozen=True, slots=True)
class RankStarted:
    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class RankEnded:
    rank: int
    code: int
    """Its exit code, or the negative number of the signal that ended it."""


@dataclass(frozen=True, slots=True)
class ForkServerEnded:
    """Nothing can be started any more, nor will anything be reported about ranks."""

    code: int


Event = RankStarted | RankEnded | ForkServerEnded


def is_stopped(pid: int) -> bool:
    """Whether a process is suspended (SIGSTOP): it reports and starts nothing."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text()
    except OSError:  # it has ended, or this system has no /proc
        return False
    return stat.rpartition(")")[2].split()[0] == "T"


class ForkServer:
    """The launcher's side: orders go out, events come in on a thread of their own."""

    def __init__(
        self, module: str, environ: Mapping[str, str], *, report: Callable[[Event], None]
    ) -> None:
        self._orders, there = Pipe()
        standard_input, self._standard_input = os.pipe()
        # -P: a file in the working folder must not shadow a library, as it does not in ours.
        command = [sys.executable, "-P", "-m", __name__, module, str(there.fileno())]
        self._process = subprocess.Popen(
            command,
            env=environ,
            stdin=standard_input,
            pass_fds=[there.fileno()],
            start_new_session=True,
        )
        os.close(standard_input)
        there.close()
        self._report = report
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """End it at once; the listener reports that."""
        self._process.kill()

    def start(self, rank: int, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        """Order a start; `environ` is added to the server's own."""
        order = {"rank": rank, "argv": list(argv), "environ": dict(environ)}
        self._order(json.dumps(order).encode())

    def close(self) -> None:
        """Make it and the ranks that still run leave."""
        os.close(self._standard_input)
        self._order(_LEAVE)
        try:
            self._process.wait(2 * TERMINATE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(TERMINATE_S)
        self._listener.join(TERMINATE_S)
        self._orders.close()

    def _order(self, order: bytes) -> None:
        with suppress(BrokenPipeError):  # it has ended, which the listener reports
            self._orders.send_bytes(order)

    def _listen(self) -> None:
        try:
            while True:
                kind, rank, number = json.loads(self._orders.recv_bytes())
                self._report(RankStarted(rank, number) if kind == "+" else RankEnded(rank, number))
        except (EOFError, OSError):
            self._report(ForkServerEnded(self._process.wait()))


@dataclass(frozen=True, slots=True)
class _Order:
    """What a newly forked rank is to be."""

    rank: int
    argv: list[str]
    environ: dict[str, str]


class _Server:
    """The server's side."""

    def __init__(self, orders: Connection) -> None:
        self._orders = orders
        self._running: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        self._wakeup, self._wakeup_writer = os.pipe()
        for end in (self._wakeup, self._wakeup_writer):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        signal.set_wakeup_fd(self._wakeup_writer)

    def serve(self) -> _Order | None:
        """Fork ranks until the launcher is gone; returns in each of them, with its order."""
        # A launcher that is gone with reports unread resets the connection in place of ending it.
        with suppress(EOFError, ConnectionError):
            while True:
                ready = wait([self._orders, self._wakeup])
                if self._wakeup in ready:
                    os.read(self._wakeup, 4096)
                    self._report_ended()
                if self._orders in ready:
                    data = self._orders.recv_bytes()
                    if data == _LEAVE:
                        break
                    order = _Order(**json.loads(data))
                    if self._fork(order.rank) == 0:
                        return order
        self._end_ranks()
        return None

    def _end_ranks(self) -> None:
        """Ranks leave with the launcher; one that cannot, because it is suspended, is ended."""
        end_s = time.monotonic() + TERMINATE_S + _GRACE_S
        while self._still_running() and time.monotonic() < end_s:
            time.sleep(_GRACE_S / 10)
        for pid in self._still_running():
            os.kill(pid, signal.SIGKILL)

    def _still_running(self) -> list[int]:
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return [pid for pid in self._running.values() if os.waitid(os.P_PID, pid, flags) is None]

    def _fork(self, rank: int) -> int:
        if rank in self._ended:
            os.waitpid(self._ended.pop(rank), 0)
        server = os.getpid()
        pid = os.fork()
        if pid:
            self._running[rank] = pid
            self._report("+", rank, pid)
        else:
            signal_at_parent_death(signal.SIGKILL)
            if os.getppid() != server:  # it was gone before the kernel knew
                os._exit(128 + signal.SIGKILL)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (self._wakeup, self._wakeup_writer):
                os.close(end)
            self._orders.close()
        return pid

    def _report_ended(self) -> None:
        for rank, pid in list(self._running.items()):
            how = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if how is not None:
                exited = how.si_code == os.CLD_EXITED
                self._ended[rank] = self._running.pop(rank)
                self._report("-", rank, how.si_status if exited else -how.si_status)

    def _report(self, kind: str, rank: int, number: int) -> None:
        self._orders.send_bytes(json.dumps((kind, rank, number)).encode())


def _main(module_name: str, orders_number: str) -> int:
    signal_at_parent_death(signal.SIGCONT)
    main = import_module(module_name).main
    gc.freeze()  # what was imported stays shared between the ranks
    order = _Server(Connection(int(orders_number))).serve()
    if order is None:
        return 0
    os.setsid()
    os.environ.update(order.environ)
    threading.Thread(target=_leave_with_launcher, daemon=True).start()
    _leave(main(order.argv))


def _leave(code: int) -> NoReturn:
    """End this rank, which has closed what it opened, as `multiprocessing` ends its processes."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:  # whoever read our output has left
        code = 128 + signal.SIGPIPE
    os._exit(code)


def _leave_with_launcher() -> None:
    """End this process when the launcher is gone, in order if the rank can still do so."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(TERMINATE_S)
    os._exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    try:
        raise SystemExit(_main(sys.argv[1], sys.argv[2]))
    except KeyboardInterrupt:  # before the rank has handlers of its own
        raise SystemExit(128 + signal.SIGINT) from None
