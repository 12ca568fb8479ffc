"""A host whose processes are forked from one inside its namespace; not a test itself."""

import ctypes
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import pytest

from scope_runners.namespaces import Host
from tests.warm_python import Process, Server

CLONE_NEWNET = 0x40000000


def enter(name: str) -> None:
    """Be in that network namespace from here on."""
    with Path("/run/netns", name).open() as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {name}")


@contextmanager
def warm_hosts(monkeypatch: pytest.MonkeyPatch, letters: str) -> Iterator[None]:
    """What starts on those of the two hosts, "a" and "b", comes from a warm server there."""
    fresh, all_of = Host.start, Host.processes
    servers = dict[str, Server]()

    def start(
        host: Host, command: Sequence[str], *, environ: Mapping[str, str], output: IO[bytes]
    ) -> subprocess.Popen[bytes] | Process:
        if host.name.split("-")[1] not in letters:
            return fresh(host, command, environ=environ, output=output)
        first = f"from tests.break_it.warm_host import enter\nenter({host.name!r})"
        servers[host.name] = Server(Path(folder, host.name), of=Process.server, first=first)
        out = output.fileno()
        with Path(os.devnull).open() as none:
            return Process(
                command,
                env=os.environ | environ,
                stdin=none.fileno(),
                stdout=out,
                stderr=out,
                start_new_session=True,
                server=servers[host.name],
            )

    def processes(host: Host) -> list[int]:
        server = servers.get(host.name)
        return [pid for pid in all_of(host) if server is None or pid != server.pid]

    with TemporaryDirectory(prefix="warm") as folder:
        patched: Any = Host
        monkeypatch.setattr(patched, "start", start)
        monkeypatch.setattr(patched, "processes", processes)
        yield
        for server in servers.values():
            server.close()
