"""Whatever one session, or one connection, does to its threads: the server and the others go on."""

import os
import resource
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from scope_contracts.errors import ScopeError
from scope_rt.file_lock import open_locked
from scope_runners.exit_codes import BAD_INPUT
from scope_runners.serve.group_control import GroupControl
from scope_runners.serve.journal import Journal
from scope_runners.serve.messages import CommandKind, End, Hello, Role
from scope_runners.serve.session import LiveSession
from scope_runners.serve.session_files import SessionFiles, StreamJob
from scope_runners.serve.session_record import read_record
from scope_runners.serve.sessions import NotMadeError, Sessions, TooManySessionsError
from scope_runners.serve.settings import ServeSettings
from scope_runners.serve.wire import Connection, socket_path
from tests.serve.lone_session import BODY, BOUND_S, header, without_processes
from tests.serve.running_server import START_S, until


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


def test_a_long_copy_for_a_fork_holds_up_nobody_who_asks_for_sessions(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, copies, may_end = with_a_chunk(sessions), threading.Event(), threading.Event()

    def copy(source: Path, target: Path) -> None:
        copies.set()
        assert may_end.wait(BOUND_S)

    monkeypatch.setattr(shutil, "copyfile", copy)
    forking = threading.Thread(target=sessions.fork, args=(parent, 0, None), daemon=True)
    forking.start()
    assert copies.wait(BOUND_S)
    asking = threading.Thread(target=sessions.all, daemon=True)
    asking.start()
    asking.join(BOUND_S / 3)
    is_held_up = asking.is_alive()
    may_end.set()
    forking.join(BOUND_S)
    assert not is_held_up
    assert [each.record.forked_from for each in sessions.all()] == ["", parent.record.id]


def test_a_session_that_cannot_be_made_is_refused_by_name_and_leaves_nothing(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **named: Any) -> None:
        raise OSError(28, "No space left on device")

    parent = with_a_chunk(sessions)
    folders = list(sessions.settings.sessions.iterdir())
    asked: list[tuple[Any, str, Callable[[], LiveSession]]] = [
        (shutil, "copyfile", lambda: sessions.fork(parent, 0, None)),
        (GroupControl, "start", lambda: sessions.create("a", {})),
        (SessionFiles, "write_job", lambda: sessions.create("a", {})),
    ]
    for owner, name, ask in asked:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, full)
            patch.setattr(GroupControl, "runs", False)
            with pytest.raises(NotMadeError, match="No space left"):
                ask()
        assert sessions.all() == (parent,)
        assert list(sessions.settings.sessions.iterdir()) == folders
    for _ in range(sessions.settings.max_sessions - 1):
        sessions.create("a", {})  # their places were given back


def test_a_fork_that_a_killed_server_had_not_finished_is_no_session(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next server of the folder reads what it finds there."""
    seen: list[bool] = []

    def copy(source: Path, target: Path) -> None:
        seen.append(read_record(SessionFiles(target.parent)) is not None)

    monkeypatch.setattr(shutil, "copyfile", copy)
    sessions.fork(with_a_chunk(sessions), 0, None)
    assert seen == [False]


def test_sessions_that_have_ended_do_not_grow_without_bound(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scope_runners.serve.sessions.MOST_ENDED", 2)
    for _ in range(2):
        sessions.create("a", {}).give_up_by(ScopeError("its plan cannot be run"))
    with pytest.raises(TooManySessionsError, match="delete those that you do not need"):
        sessions.create("a", {})
    sessions.delete(sessions.all()[0].record.id)
    sessions.create("a", {})


def test_a_launcher_that_came_second_does_not_hide_the_first(tmp_path: Path) -> None:
    files = SessionFiles(tmp_path)
    group = GroupControl(files)
    lock = open_locked(files.launcher_lock)  # of one that a killed server had just started
    files.write_job(
        StreamJob(
            session_id="9a",
            socket=tmp_path / "none",
            prompt="a",
            settings={},
            threads=1,
            keeps_latents=True,
        )
    )
    group.start()
    assert group._process is not None
    assert group._process.wait(START_S) == BAD_INPUT
    assert group.runs
    os.close(lock)
    assert not group.runs


def with_a_chunk(sessions: Sessions) -> LiveSession:
    session = sessions.create("a", {})
    session.files.log.touch()
    session.taken.add(0, 0)
    return session


def test_a_journal_of_another_version_keeps_no_other_session_from_being_continued(
    tmp_path: Path,
) -> None:
    with without_processes():
        settings = ServeSettings(folder=tmp_path, max_sessions=2)
        before = Sessions(settings)
        before.open()
        strange, other = before.create("a", {}), before.create("a", {})
        before.close()
        journal = Journal(strange.files.journal)
        journal.append({"fact": "receipt", "id": "1", "kind": "wish", "state": "granted"})
        journal.close()
        after = Sessions(settings)
        after.open()
        assert [each.record.id for each in after.all()] == [other.record.id]
        after.close()


def test_who_asks_for_a_session_as_its_lease_ends_keeps_it(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over, asked = LiveSession.is_over.fget, list[Any]()  # type: ignore[attr-defined]

    def asked_for_meanwhile(session: LiveSession) -> bool:
        was_over = bool(is_over(session))
        if was_over and not asked:
            asked.append(sessions.get(session.record.id))
        return was_over

    monkeypatch.setattr(LiveSession, "is_over", property(asked_for_meanwhile))
    session = sessions.create("a", {}, lease_s=2.0)
    until(lambda: asked, what="the end of its lease")
    assert asked == [session]
    until(lambda: sessions.get(session.record.id) is session, what="it in its place")
