"""Python processes forked from one that has imported what they run; not a test itself.

A process that imports torch and the package takes seconds of a core before it does anything. The
processes here come from a server that has done so once: they begin with their own arguments,
variables, folder, files and signals, as a module run by `python -m`, code run by `python -c` or a
file, and end as the interpreter does. Fork servers of launchers, and the ranks that torchrun starts
in such a process, come from there too. What they cannot show is what importing, installing or
finding a module does: tests of that start an interpreter.
"""

import atexit
import fcntl
import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from scope_runners import fork_server
from scope_runners.serve import group_control

START_S = 100.0
"""How long the server may take to import everything."""
LONGEST_ORDER = 200_000
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Forking is safe then, and connections that end leave no stack traces."""
PRELOADED = (
    "scope_runners.main",
    "scope_runners.stream",
    "scope_runners.replay",
    "scope_runners.launcher",
    "scope_runners.break_it.rank_main",
    "scope_runners.break_it.stream",
    "scope_runners.serve.command",
    "scope_runners.serve.group_process",
    "scope_runners.serve.rank",
    "scope_runners.serve.server",
    "torch.distributed.run",
)
_STARTS_RANKS = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
"""Where torchrun has its `Popen`."""
Stream = int | IO[bytes] | None
_STOPS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)


class Process:
    """The part of `subprocess.Popen` that its users here need, for `sys.executable` alone.

    `args` is the interpreter with -P or -u, then -m NAME, -c CODE or a file, and arguments. A
    stream that is None is this process's own, and one that is DEVNULL is empty.
    """

    server: "Server"

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdin: Stream = None,
        stdout: Stream = None,
        stderr: Stream = None,
        pass_fds: Sequence[int] = (),
        start_new_session: bool = False,
        server: "Server | None" = None,
    ) -> None:
        assert args[0] == sys.executable
        self.args = args
        self.returncode: int | None = None
        streams = (stdin, stdout, stderr)
        order = {
            "args": list(args[1:]),
            "env": dict(os.environ if env is None else env),
            "cwd": str(cwd or Path.cwd()),
            "targets": [0, 1, 2, *pass_fds],
            "ignored": [s for s in _STOPS if signal.getsignal(s) is signal.SIG_IGN],
            "session": start_new_session,
        }
        self._lock = threading.Lock()
        self._link = (server or self.server).connect()
        with Path(os.devnull).open("r+") as none:
            files = [_number(stream, own, none) for own, stream in enumerate(streams)]
            socket.send_fds(self._link, [json.dumps(order).encode()], [*files, *pass_fds])
        self._wait_for_answer(START_S)
        self.pid = int(self._link.recv(100))

    def __del__(self) -> None:
        self._link.close()

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *how: object) -> None:
        self.wait()

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, or the negative number of a signal; any thread may wait.

        Raises:
            subprocess.TimeoutExpired: it has not ended within `timeout` seconds.
        """
        if self.returncode is None:
            self._wait_for_answer(timeout)
            with self._lock:
                if self.returncode is None:
                    self.returncode = int(self._link.recv(100))
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _wait_for_answer(self, timeout: float | None) -> None:
        polled = select.poll()
        polled.register(self._link, select.POLLIN)
        if not polled.poll(None if timeout is None else 1000 * timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)


def _number(stream: Stream, own: int, none: IO[str]) -> int:
    if stream == subprocess.DEVNULL:
        return none.fileno()
    if stream is None or isinstance(stream, int):
        return own if stream is None else stream
    return stream.fileno()


def run(
    args: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    server: "Server | None" = None,
) -> subprocess.CompletedProcess[str]:
    """Like `subprocess.run` with what is printed captured as text, and no input."""
    with (
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
        Path(os.devnull).open() as none,
    ):
        process = Process(
            args,
            env=env,
            cwd=cwd,
            stdin=none.fileno(),
            stdout=out.fileno(),
            stderr=err.fileno(),
            server=server,
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        printed = []
        for file in (out, err):
            file.seek(0)
            printed.append(file.read().decode())
    return subprocess.CompletedProcess(args, code, *printed)


class Server:
    """Starts with the first process that is asked for, and ends with its owner.

    Its processes have imported our packages from the folders of `packages`, where there are any,
    and else from this repository. One `of` another server is forked from that one, and runs the
    code `first` before it serves.
    """

    def __init__(
        self, path: Path, *packages: Path, of: "Server | None" = None, first: str = ""
    ) -> None:
        self.path, self.packages = path, packages
        self._of, self._first = of, first
        self._process: subprocess.Popen[bytes] | Process | None = None
        self._input = -1

    def connect(self) -> socket.socket:
        if not self.path.exists():
            self.start()
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONGEST_ORDER)
        link.connect(str(self.path))
        return link

    @property
    def pid(self) -> int:
        """Of the process that serves."""
        assert self._process is not None, "it has not started"
        return self._process.pid

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *how: object) -> None:
        self.close()

    def close(self) -> None:
        if self._process is not None:
            os.close(self._input)
            self._process.wait(10.0)

    def start(self) -> None:
        """Blocks until it serves.

        Raises:
            RuntimeError: it has ended, or does not serve within START_S.
        """
        its_input, self._input = os.pipe()
        self._process = self._launched(its_input)
        os.close(its_input)
        deadline_s = time.monotonic() + START_S
        while not self.path.exists():
            if self._process.poll() is not None:
                raise RuntimeError("the server of warm processes has ended")
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"the server of warm processes did not start in {START_S} s")
            time.sleep(0.01)

    def _launched(self, its_input: int) -> "subprocess.Popen[bytes] | Process":
        root = Path(__file__).parents[1]
        if self._of is not None:
            code = f"{self._first}\nfrom tests.warm_python import serve\nserve({str(self.path)!r})"
            command = [sys.executable, "-c", code]
            with Path(os.devnull).open("w") as none:
                return Process(
                    command, cwd=root, stdin=its_input, stdout=none.fileno(), server=self._of
                )
        first = map(str, [*self.packages, os.environ.get("PYTHONPATH", ""), root])
        return subprocess.Popen(
            [sys.executable, "-m", __name__, str(self.path)],
            stdin=its_input,
            cwd=(*self.packages, root)[0],
            env=os.environ | ONE_THREAD | {"PYTHONPATH": os.pathsep.join(filter(None, first))},
        )


def warm_launchers() -> None:
    """From here on, launchers of this process fork their fork servers from the warm one, and
    servers of streams their launchers.
    """
    for module in (fork_server, group_control):
        own: Any = module
        own.subprocess = SimpleNamespace(
            Popen=Process, TimeoutExpired=subprocess.TimeoutExpired, DEVNULL=subprocess.DEVNULL
        )


def _keep_operators() -> None:
    """Processes of this one end without taking back, one by one, what torch has registered."""
    every: Any = weakref.finalize
    for finalizer in list(every._registry):
        if finalizer.peek()[1].__module__ == "torch.library":
            finalizer.atexit = False


def _serve(path: Path) -> dict[str, Any] | None:
    """Fork processes until standard input ends; returns in each of them, with its order."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{path}.new")
    listener.listen(64)
    Path(f"{path}.new").rename(path)
    children: dict[int, tuple[int, socket.socket]] = {}
    orders = list[socket.socket]()
    while True:
        watched: list[Any] = [0, listener, *orders, *children]
        ready, _, _ = select.select(watched, [], [])
        if 0 in ready:
            return None
        if listener in ready:
            orders.append(listener.accept()[0])
        for ended in children.keys() & {r for r in ready if isinstance(r, int)}:
            pid, link = children.pop(ended)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with suppress(OSError):  # nobody waits for it any more
                link.send(str(code).encode())
            link.close()
            os.close(ended)
        for link in [link for link in orders if link in ready]:
            orders.remove(link)
            data, files, _, _ = socket.recv_fds(link, LONGEST_ORDER, 64)
            if not data:
                link.close()
                continue
            pid = os.fork()
            if pid == 0:
                for other in (listener, link, *orders, *(each for _, each in children.values())):
                    other.close()
                for handle in children:
                    os.close(handle)
                return {**json.loads(data), "files": files}
            for file in files:
                os.close(file)
            link.send(str(pid).encode())
            children[os.pidfd_open(pid)] = (pid, link)


def _take_over(order: dict[str, Any], own_path: Sequence[str]) -> tuple[str, str]:
    """Make this process what was ordered: -m, -c or "", and its name, code or file."""
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, 500) for file in order["files"]]
    for file in order["files"]:
        os.close(file)
    for file, target in zip(high, order["targets"], strict=True):
        os.dup2(file, target)
        os.close(file)
    if order["session"]:
        os.setsid()
    for signum in _STOPS:
        default = signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL
        signal.signal(signum, signal.SIG_IGN if signum in order["ignored"] else default)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    words = order["args"]
    is_safe = words[0] == "-P"
    words = words[words[0] in ("-P", "-u") :]
    if words[0] not in ("-m", "-c"):
        words = ["", *words]
    kind, what, *arguments = words
    sys.argv = [kind or what, *arguments]
    its_folder = {"-m": order["cwd"], "-c": "", "": str(Path(what).parent.absolute())}
    first = [] if is_safe else [its_folder[kind]]
    sys.path[:] = [*first, *filter(None, order["env"].get("PYTHONPATH", "").split(":")), *own_path]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for the life of this process
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    random.seed()
    return kind, what


def _run(kind: str, what: str) -> int:
    """Run it as the interpreter would, and return its exit code."""
    try:
        if kind == "-m":
            sys.modules.pop(what, None)
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        elif not kind:
            runpy.run_path(what, run_name="__main__")
        else:
            main: Any = sys.modules["__main__"].__dict__
            exec(compile(what, "<string>", "exec"), main)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
        return 1
    return 0


def serve(path: str) -> None:
    """Fork processes from this one until its standard input ends; each of them ends here."""
    added = os.environ.get("PYTHONPATH", "").split(":")
    own_path = [entry for entry in sys.path[1:] if entry not in added]
    Process.server = Server(Path(path))
    gc.freeze()
    gc.enable()
    order = _serve(Path(path))
    if order is None:
        return
    code = _run(*_take_over(order, own_path))
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _main(path: str) -> None:
    gc.disable()  # nothing of what is imported is garbage
    for module in PRELOADED:
        import_module(module)
    warm_launchers()
    torchrun: Any = import_module(_STARTS_RANKS)
    torchrun.Popen = Process
    _keep_operators()
    serve(path)


if __name__ == "__main__":
    # The one that tests import, so that a launcher in a warm process finds this server.
    this: Any = import_module("tests.warm_python")
    this._main(sys.argv[1])
