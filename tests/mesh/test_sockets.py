"""Only the very sockets that were seen are touched, whatever their numbers stand for later."""

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import (  # type: ignore[attr-defined]
    AllreduceOptions,
    PrefixStore,
    ProcessGroupGloo,
)

from scope_rt.mesh.meeting_point import host_store
from scope_rt.mesh.sockets import OpenSocket, local_addresses, open_sockets, shut_down


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        return here, server.accept()[0]


def test_a_shut_down_frees_whoever_reads() -> None:
    before = open_sockets()
    here, there = connected()
    shut_down(open_sockets() - before)
    assert here.recv(1) == b""
    assert there.recv(1) == b""
    here.close()
    there.close()


def test_a_number_that_stands_for_another_socket_by_now_is_left_alone() -> None:
    before = open_sockets()
    old, far = connected()
    seen = open_sockets() - before
    here, there = connected()
    os.dup2(here.fileno(), old.fileno())
    os.dup2(there.fileno(), far.fileno())
    shut_down(seen)
    here.sendall(b"x")
    assert there.recv(1) == b"x"
    for each in (old, far, here, there):
        each.close()


def test_a_listening_socket_goes_on_listening() -> None:
    before = open_sockets()
    with socket.create_server(("127.0.0.1", 0)) as server:
        shut_down(open_sockets() - before)
        with socket.create_connection(server.getsockname(), timeout=5):
            assert local_addresses(open_sockets() - before) >= {server.getsockname()}


def test_files_and_local_sockets_do_not_count() -> None:
    before = open_sockets()
    here, there = socket.socketpair()
    with open(os.devnull), here, there:
        assert open_sockets() <= before  # others may close theirs meanwhile


def numbers_of(path: Path) -> int:
    """How many file descriptors of this process stand for `path`."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum(os.path.exists(link) and os.path.samefile(link, path) for link in links)


def test_looking_at_a_number_that_stands_for_a_file_by_now_costs_no_number(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        here, there = socket.socketpair()
        stale = OpenSocket.at(here.fileno())
        os.dup2(file.fileno(), stale.number)
        for _ in range(10):
            shut_down([stale])
        assert numbers_of(tmp_path / "file") == 2
        here.close()
        there.close()


SILENT_RANK = """
import sys
from datetime import timedelta
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
group = ProcessGroupGloo(PrefixStore("pair", store), 1, 2, timedelta(seconds=60))
sys.stdin.read()
"""


def test_gloo_ends_no_wait_when_it_is_aborted_and_a_shut_down_does() -> None:
    """Should the first half fail one day, `ProcessGroupGloo.abort` can replace `sockets`."""
    store, before = host_store(), open_sockets()
    command = [sys.executable, "-c", SILENT_RANK, str(store.port)]
    with (
        ThreadPoolExecutor(1) as pool,
        subprocess.Popen(command, stdin=subprocess.PIPE) as silent,
    ):
        group: Any = ProcessGroupGloo(PrefixStore("pair", store), 0, 2, timedelta(seconds=60))
        work = group.allreduce([torch.ones(1)], AllreduceOptions())
        waiting = pool.submit(work.wait)
        group.abort()
        time.sleep(1.0)
        assert not waiting.done()
        shut_down(open_sockets() - before)
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            waiting.result(timeout=20)
        silent.kill()
