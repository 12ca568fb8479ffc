"""Two hosts on one machine: network namespaces joined by a cable that can be cut.

Nothing of them outlives the `with` block, neither a namespace nor a process in one.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import IO, Self

from scope_contracts.errors import UserInputError

INTERFACE = "cable0"
"""What each host calls its end of the cable."""
_MAX_RESTARTS = 3
"""Of torchrun, in the life of a stream."""
_NETWORK = "192.0.2.{}/24"
_PORT = 29400
_LONGEST_CUT_S = 900
"""After so long without its store, torchrun itself gives up (by default, after 60 s)."""
_END_S = 10.0


@dataclass(frozen=True, slots=True)
class Host:
    """A network namespace with an address of its own."""

    name: str
    address: str

    def start(
        self, command: Sequence[str], *, environ: Mapping[str, str], output: IO[bytes] | int
    ) -> subprocess.Popen[bytes]:
        """Run `command` there, what it prints going to `output`."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, *command],
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def processes(self) -> list[int]:
        """Ids of the processes that run there."""
        return [int(pid) for pid in _ip("netns", "pids", self.name).split()]


def torchrun(host: Host, *, store: Host, num_ranks: int, program: Sequence[str]) -> list[str]:
    """The command that a host of two runs: `program`, a module and its arguments, as `num_ranks`
    ranks, which meet those of the other host at `store`."""
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", "2", "--nproc-per-node", str(num_ranks)),
        *("--max-restarts", str(_MAX_RESTARTS)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{store.address}:{_PORT}"),
        *("--rdzv-id", "two-hosts"),
        f"--rdzv-conf=is_host={int(host == store)},read_timeout={_LONGEST_CUT_S}",
        *("--local-addr", host.address),
        *("-m", *program),
    ]


class CabledHosts:
    """Two hosts and the cable between them."""

    def __init__(self) -> None:
        """Raises `UserInputError` where this process may not make network namespaces."""
        reason = why_not()
        if reason is not None:
            raise UserInputError(reason)
        names = [f"scope-{letter}-{os.getpid()}" for letter in "ab"]
        self.hosts = tuple(Host(name, _NETWORK.format(n)[:-3]) for n, name in enumerate(names, 1))
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            for host in self.hosts:
                _ip("netns", "add", host.name)
                undo.callback(_remove, host)
            end_a, end_b = (["netns", host.name] for host in self.hosts)
            # Both ends are born where they belong: their name may be taken out here.
            _ip("link", "add", INTERFACE, *end_a, "type", "veth", "peer", "name", INTERFACE, *end_b)
            for number, host in enumerate(self.hosts, 1):
                _ip("-n", host.name, "addr", "add", _NETWORK.format(number), "dev", INTERFACE)
                for interface in ("lo", INTERFACE):
                    _ip("-n", host.name, "link", "set", interface, "up")
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def cut(self) -> None:
        """No packet passes, and no end is notified."""
        _ip("-n", self.hosts[0].name, "link", "set", INTERFACE, "down")

    def restore(self) -> None:
        """Packets pass again."""
        _ip("-n", self.hosts[0].name, "link", "set", INTERFACE, "up")


def why_not() -> str | None:
    """Why this process cannot make two hosts; None where it can."""
    if not sys.platform.startswith("linux"):
        return "two hosts on one machine need Linux network namespaces"
    if shutil.which("ip") is None:
        return "two hosts on one machine need the program ip; install the package iproute2"
    if os.geteuid() != 0:
        return "two hosts on one machine need root, to make network namespaces"
    probe = f"scope-probe-{os.getpid()}"
    try:
        _ip("netns", "add", probe)
        _ip("netns", "del", probe)
    except UserInputError as error:
        return f"two hosts on one machine need the right to make network namespaces ({error})"
    return None


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=_END_S)
    if done.returncode:
        raise UserInputError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def _remove(host: Host) -> None:
    """A namespace exists while a process is in it."""
    deadline_s = time.monotonic() + _END_S
    while (pids := host.processes()) and time.monotonic() < deadline_s:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    _ip("netns", "del", host.name)
