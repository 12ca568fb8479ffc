"""Whatever one session, or one connection, does to its threads: the server and the others go on."""

import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from scope_runners.serve.messages import CommandKind, End, Hello, Role
from scope_runners.serve.sessions import Sessions
from scope_runners.serve.settings import ServeSettings
from scope_runners.serve.wire import Connection, socket_path
from tests.serve.lone_session import BODY, BOUND_S, header, without_processes
from tests.serve.running_server import until


@pytest.fixture
def sessions(tmp_path: Path) -> Iterator[Sessions]:
    with without_processes():
        sessions = Sessions(ServeSettings(folder=tmp_path, max_sessions=4))
        sessions.open()
        yield sessions
        sessions.close()


@contextmanager
def connected(sessions: Sessions, session_id: str) -> Iterator[Connection]:
    """As the rank0 of a session."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
        end.settimeout(BOUND_S)
        end.connect(str(socket_path(sessions.settings.folder)))
        connection = Connection(end)
        connection.send(Hello(role=Role.RANK0, session_id=session_id, pid=1))
        yield connection


def test_ranks_of_a_session_that_is_not_there_are_told_to_end(sessions: Sessions) -> None:
    with connected(sessions, "unknown") as rank0:
        assert isinstance(rank0.receive()[0], End)


def test_ranks_connect_again_once_the_server_may_open_files(sessions: Sessions) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end:
        end.settimeout(BOUND_S)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            end.connect(str(socket_path(sessions.settings.folder)))
            time.sleep(0.5)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        connection = Connection(end)
        connection.send(Hello(role=Role.RANK0, session_id="unknown", pid=1))
        assert isinstance(connection.receive()[0], End)


def test_a_session_that_cannot_be_followed_is_told_so_by_its_state(sessions: Sessions) -> None:
    session = sessions.create("a", {})
    with connected(sessions, session.record.id) as rank0:
        rank0.send(header(0, BODY), BODY)  # before it has said what it is
        until(lambda: session.state == "failed", what="the failure", within_s=BOUND_S)
    assert "the server failed" in session.view()["detail"]


def test_one_session_that_cannot_be_looked_after_leaves_the_others_their_leases(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> Any:
        raise OSError(24, "Too many open files")

    broken, other = sessions.create("a", {}), sessions.create("a", {}, lease_s=2.0)
    monkeypatch.setattr(broken, "look", fails)
    name = other.record.id
    until(
        lambda: name not in [each.record.id for each in sessions.all()],
        what="the end of the lease",
        within_s=BOUND_S,
    )
    assert broken in sessions.all()


def test_a_full_disk_keeps_no_session_from_being_deleted(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, data: bytes, at: int) -> int:
        raise OSError(28, "No space left on device")

    session = sessions.create("a", {})
    session.post(CommandKind.HARD_CUT, {})
    monkeypatch.setattr(os, "pwrite", full)
    assert sessions.delete(session.record.id)
    assert session.state == "stopped"
    assert not session.files.folder.exists()
