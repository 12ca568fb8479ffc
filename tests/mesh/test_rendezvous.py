"""All ranks of one start meet, whatever the store remembers, or each of them says who lacks."""

import os
import signal
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from scope_contracts.errors import LinkError, LinkTimeoutError
from scope_rt.mesh import meeting_point, rendezvous
from scope_rt.mesh.authentic import Key
from scope_rt.mesh.meeting_point import MeetingPoint, host_store
from scope_rt.mesh.rendezvous import Meeting, meet
from scope_rt.mesh.sockets import connections_to
from tests.mesh.meetings import StandingClock, meet_all, meet_two, point_at, store_elsewhere


def names_of(meetings: list[Meeting | BaseException]) -> set[str]:
    assert all(isinstance(each, Meeting) for each in meetings), meetings
    return {each.name for each in meetings if isinstance(each, Meeting)}


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_restart_meets_again_among_the_keys_of_earlier_starts(late: int) -> None:
    store = host_store()
    point = point_at(store.port)
    names = [
        names_of(meet_all(point, [0, 1, 2], world_size=3, late=late)),
        names_of(meet_all(point, [0, 1, 2], world_size=3, late=late)),
        names_of(meet_all(point, [0, 1], world_size=2, late=late % 2)),
    ]
    assert [len(each) for each in names] == [1, 1, 1], "some ranks met others"
    assert len(set.union(*names)) == 3, "a start found an earlier one's keys"


def test_keys_of_one_start_are_unknown_to_the_next() -> None:
    store = host_store()
    point = point_at(store.port)
    first, second = (meet(point, rank=0, world_size=1, timeout_s=5) for _ in range(2))
    first.store.set("key", "")
    assert first.connect(timeout_s=5, reads_s=5).check(["key"])
    assert not second.store.check(["key"])


def test_a_rank_that_vanished_while_meeting_is_replaced() -> None:
    store = host_store()
    store.set("scope/join/1", "the token of a process that is no more")
    meetings = meet_all(point_at(store.port), [0, 1], world_size=2, late=1)
    assert len(names_of(meetings)) == 1


@pytest.mark.parametrize("has_met_before", [False, True])
@pytest.mark.parametrize(
    ("ranks", "lacking"), [([0, 1], "rank 2"), ([1, 2], "rank 0"), ([0], "ranks 1, 2")]
)
def test_every_rank_names_those_who_did_not_come(
    ranks: list[int], lacking: str, has_met_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = host_store()
    point = point_at(store.port)
    if has_met_before:
        names_of(meet_all(point, [0, 1, 2], world_size=3))
    clock = StandingClock(len(ranks))
    monkeypatch.setattr(rendezvous, "time", clock)
    monkeypatch.setattr(meeting_point, "time", clock)
    monkeypatch.setattr(rendezvous, "GRACE_S", StandingClock.BOUND_S)  # by another clock
    for error in meet_all(point, ranks, world_size=3, timeout_s=0.5):
        assert isinstance(error, LinkTimeoutError)
        want = f"meeting the other ranks: {lacking} did not come within 0.5 s"
        assert error.args[0] == want


def test_a_silent_address_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(LinkTimeoutError, match=f"the store at 127.0.0.1:{port} does not answer"):
        meet(point_at(port), rank=1, world_size=2, timeout_s=0.2)


@pytest.mark.parametrize("when", ["before", "while meeting"])
def test_a_store_that_was_stopped_is_waited_for_no_longer_than_asked(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_elsewhere() as (process, point):

        class LastParticipant(rendezvous._Participant):
            """The store is stopped as soon as it has come."""

            def __init__(self, store: Any, key: Key, *, rank: int, world_size: int) -> None:
                super().__init__(store, key, rank=rank, world_size=world_size)
                os.kill(process.pid, signal.SIGSTOP)

        if when == "before":
            os.kill(process.pid, signal.SIGSTOP)
        else:
            monkeypatch.setattr(rendezvous, "_Participant", LastParticipant)
        with (
            ThreadPoolExecutor(1) as pool,
            pytest.raises(LinkTimeoutError, match="does not answer"),
        ):
            pool.submit(meet, point, rank=0, world_size=2, timeout_s=1.5).result(timeout=15)


@pytest.mark.parametrize("all_come", [True, False])
def test_a_meeting_leaves_connections_that_are_not_its_own_alone(all_come: bool) -> None:
    with store_elsewhere() as (process, point), socket.create_server(("127.0.0.1", 0)) as server:
        with ThreadPoolExecutor(1) as pool:
            patience_s = 20.0 if all_come else 1.5
            meeting = pool.submit(meet, point, rank=0, world_size=2, timeout_s=patience_s)
            while not connections_to(point.port) and not meeting.done():
                time.sleep(0.01)
            here, there = socket.create_connection(server.getsockname()), server.accept()[0]
            if all_come:
                meet(point, rank=1, world_size=2, timeout_s=20)
                meeting.result(timeout=20)
            else:
                os.kill(process.pid, signal.SIGSTOP)
                with pytest.raises(LinkTimeoutError):
                    meeting.result(timeout=10)
        with here, there:
            unbounded = bytes(struct.calcsize("ll"))
            assert (
                here.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, len(unbounded)) == unbounded
            )
            here.sendall(b"x")
            assert there.recv(1) == b"x"


def test_a_default_timeout_of_the_process_is_none_of_the_stores() -> None:
    store = host_store()
    socket.setdefaulttimeout(5)
    try:
        first, second = meet_two(point_at(store.port))
        late = threading.Timer(0.5, second.store.set, ("late", "here"))
        late.start()
        assert first.store.get("late") == b"here"
        late.join()
    finally:
        socket.setdefaulttimeout(None)


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        point = MeetingPoint(
            host="127.0.0.1", port=server.getsockname()[1], is_hosted_by_rank0=True
        )
        with pytest.raises(LinkError, match=f"MASTER_PORT {point.port} is taken; choose another"):
            meet(point, rank=0, world_size=2, timeout_s=5)


def test_rank0_hosts_one_session_after_another_on_the_same_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    point = MeetingPoint(host="127.0.0.1", port=port, is_hosted_by_rank0=True)
    first = names_of(meet_all(point, [0, 1], world_size=2, late=0))
    second = names_of(meet_all(point, [0, 1], world_size=2, late=0))
    assert len(first) == len(second) == 1
    assert first != second
