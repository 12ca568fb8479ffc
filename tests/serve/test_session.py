"""What a session promises its clients, whatever its rank0 does."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from scope_contracts.errors import LinkError
from scope_contracts.retraction import Retraction
from scope_runners.serve.journal import JournalError
from scope_runners.serve.messages import Command, CommandKind, Credit, Failed, Taken
from scope_runners.serve.outbox import MOST_WAITING, Outbox
from scope_runners.serve.session import LiveSession
from scope_runners.serve.wire import Connection
from tests.serve.lone_session import (
    BODY,
    BOUND_S,
    READY,
    header,
    rank0_of,
    serving,
    session_in,
    without_processes,
)


@pytest.fixture
def session(tmp_path: Path) -> Iterator[LiveSession]:
    with without_processes():
        session = session_in(tmp_path / "session")
        yield session
        session.end("the test ends")


def test_cuts_that_are_posted_before_a_chunk_comes_share_one_chunk(session: LiveSession) -> None:
    with rank0_of(session) as rank0:
        names = {session.post(CommandKind.HARD_CUT, {}).id for _ in range(50)}
        credit = 0
        while names:
            match rank0.receive()[0]:
                case Command(command_id=name):
                    names.remove(name)
                case Credit(end=end):
                    credit = max(credit, end)
        assert 0 < credit <= 2, "chunks that nobody has asked for wait before the next prompt"


def test_a_rank0_that_reads_nothing_holds_up_no_request(session: LiveSession) -> None:
    def ask() -> None:
        for _ in range(100):
            session.post(CommandKind.PROMPT, {"text": "\N{WHITE SQUARE}" * 4000})
        session.view()

    with rank0_of(session):
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(BOUND_S)
        assert not asking.is_alive(), "it waits for a process that may be stopped"


def test_what_rank0_does_not_read_has_a_bound(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.settimeout(BOUND_S)
    mine, its = Connection(ours), Connection(theirs)
    outbox = Outbox(its)
    for number in range(3 * MOST_WAITING):
        outbox.put(Credit(end=number), b"")
    with pytest.raises(LinkError):
        for number in range(3 * MOST_WAITING):
            assert mine.receive()[0] == Credit(end=number)
    mine.close()


def test_a_session_that_has_failed_is_not_revived_by_ranks_that_come_back(
    session: LiveSession,
) -> None:
    session.give_up_by(JournalError("the disk is full"))
    with serving(session) as rank0, pytest.raises(LinkError):
        rank0.send(READY)
        while True:
            rank0.receive()
    assert (session.state, session.view()["detail"]) == ("failed", "the disk is full")


def test_a_loss_is_not_explained_by_one_that_was_mended(session: LiveSession) -> None:
    with rank0_of(session) as rank0:
        rank0.send(Failed(sentence="the cable was cut"))
    assert session.view()["detail"] == "the cable was cut"
    with rank0_of(session):
        pass
    assert session.view()["detail"] == "rank 0 is gone; it starts again"


def test_a_server_that_was_started_again_knows_what_is_retracted(session: LiveSession) -> None:
    wrong = Retraction(first_chunk=3, last_chunk=5, first_epoch=0, last_epoch=0, reason="rank 1")
    for _ in range(2):
        with rank0_of(session, resumed=False, retractions=(wrong,)):
            assert len(session.view()["retractions"]) == 1


def test_ranks_that_start_again_are_a_recovery_and_the_first_of_a_fork_are_none(
    session: LiveSession,
) -> None:
    with rank0_of(session, resumed=True, next_chunk=5) as rank0:
        assert session.stats()["recoveries"] == 0
        rank0.send(header(5, BODY), BODY)
        while not isinstance(rank0.receive()[0], Taken):
            continue
    with rank0_of(session, resumed=True, next_chunk=6):
        assert session.stats()["recoveries"] == 1
