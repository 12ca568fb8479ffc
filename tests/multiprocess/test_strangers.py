"""Real ranks over gloo: who is in a rank's place without its secret is refused before a word."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scope_contracts.errors import AuthenticationError, LinkError
from scope_rt.mesh import process_group
from scope_rt.mesh.authentic import Key
from scope_rt.mesh.meeting_point import host_store
from scope_rt.mesh.process_group import leave_world
from scope_rt.mesh.rendezvous import Meeting, meet
from scope_rt.mesh.sockets import open_sockets
from scope_rt.stream_secret import StreamSecret
from tests.multiprocess.ranks import Ranks, free_port
from tests.multiprocess.test_liveness import PP0, join

SECRETS = {name: StreamSecret(name.encode() * 32) for name in "ab"}
"""By a letter; any other is of a rank that has none."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    store = host_store()
    yield store.port
    del store


def come_with(port: int, secrets: str) -> None:
    join(port, secret=SECRETS.get(secrets[int(os.environ["RANK"])]), start_s=2.0).leave()


@pytest.mark.parametrize(
    ("secrets", "rank0_names"), [("aba", "rank 1"), ("a-a", "rank 1"), ("-aa", "ranks 1, 2")]
)
def test_a_secret_that_only_some_ranks_have_is_named_by_all(
    ranks: Ranks, port: int, secrets: str, rank0_names: str
) -> None:
    said = [error for _, error in ranks.run(3, come_with, port=port, secrets=secrets)]
    assert all(error and error.startswith("AuthenticationError: meeting the") for error in said)
    assert f"{rank0_names} did not come with this stream's secret" in str(said[0])


def take_a_connection(port: int) -> str:
    """Rank 1 is reached by gloo as by everyone, and does not know what the meeting agreed on."""

    def as_stranger(*arguments: Any, **options: Any) -> Meeting:
        return replace(meet(*arguments, **options), key=Key.of(None))

    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == "1":
            patch.setattr(process_group, "meet", as_stranger)
        with pytest.raises(AuthenticationError) as refused:
            join(port, secret=SECRETS["a"])
        return str(refused.value)


def test_whoever_took_a_ranks_connection_is_refused_before_anything_is_sent(
    ranks: Ranks, port: int
) -> None:
    said = ranks.results(3, take_a_connection, port=port)
    for sentence in (said[0], said[2]):
        assert sentence.startswith("proving rank 1: what connected in its place does not know this")


def listening(port: int, hosted: bool) -> list[tuple[str, bool]]:
    """Where this rank listens, once all groups are there."""
    before = open_sockets()
    world = join(port, secret=SECRETS["a"], hosted=hosted)
    world.build_groups(PP0)
    found = []
    for each in open_sockets() - before:
        with suppress(OSError), each.borrowed() as borrowed:
            if borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                host, number, *_ = borrowed.getsockname()
                found.append((host, number == port))
    world.exchange(b"have looked")
    world.leave()
    return found


@pytest.mark.parametrize("hosted", [True, False])
def test_ranks_of_one_host_listen_on_loopback_alone(ranks: Ranks, port: int, hosted: bool) -> None:
    by_rank = ranks.results(3, listening, port=port if hosted else free_port(), hosted=hosted)
    assert all(by_rank), "nobody listens"
    assert {host for found in by_rank for host, _ in found} == {"127.0.0.1"}
    assert any(is_store for _, is_store in by_rank[0]) != hosted


def build_groups_and_talk(port: int, times: int) -> list[str]:
    """Meet, build all groups and talk, again and again; what was refused, by name."""
    refused = []
    for _ in range(times):
        world = None
        try:
            world = join(port, secret=SECRETS["a"], start_s=6.0)
            groups = world.build_groups(PP0)
            world.heartbeat.start()
            assert world.exchange(b"here") == [b"here"] * 3
            if groups.digests is not None:
                assert groups.digests.gather(b"there") == [b"there"] * 2
        except LinkError as error:
            refused.append(f"{type(error).__name__}: {error}")
        finally:
            if world is not None:
                world.leave()
            leave_world()
    return refused


def ports_of(pids: list[int]) -> set[int]:
    """Where processes of this machine listen."""
    sockets = set()
    for pid in pids:
        with suppress(OSError):
            for each in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    sockets.add(os.readlink(each))
    rows = [line.split() for name in ("tcp", "tcp6") for line in _table(name)]
    return {
        int(row[1].rpartition(":")[2], 16)
        for row in rows
        if row[3] == "0A" and f"socket:[{row[9]}]" in sockets
    }


def _table(name: str) -> list[str]:
    path = Path("/proc/net", name)
    return path.read_text().splitlines()[1:] if path.exists() else []


def while_strangers_connect(
    ranks: Ranks, port: int, says: bytes
) -> tuple[list[list[str]], set[int]]:
    """What each rank of a meeting says, and the ports at which strangers reached them."""
    pids = [process.pid for process in ranks._processes]
    is_over, reached = threading.Event(), set[int]()
    with ExitStack() as connections:

        def keep_on() -> None:
            while not is_over.wait(0.002):
                for listening_port in ports_of(pids) - reached:
                    with suppress(OSError):
                        stranger = socket.create_connection(("127.0.0.1", listening_port), 2)
                        connections.enter_context(stranger)
                        stranger.sendall(says)
                        reached.add(listening_port)

        attacking = threading.Thread(target=keep_on)
        attacking.start()
        try:
            by_rank = ranks.results(3, build_groups_and_talk, port=port, times=1, bound_s=40)
        finally:
            is_over.set()
            attacking.join(30)
    return by_rank, reached


@pytest.mark.parametrize(
    "says",
    [b"", b"\x01", b"\0" * 8, b"\0" * 80, b"\xff" * 4096],
    ids=["nothing", "half", "zero", "more", "noise"],
)
def test_strangers_at_the_ports_of_gloo_join_nothing_and_are_gone_with_a_restart(
    ranks: Ranks, port: int, says: bytes
) -> None:
    """They connect to every port on which a rank listens as soon as it does, and stay. Eight bytes
    of zero are what the first rank to connect says to gloo: they may take its place, and no more.
    """
    assert ranks.results(3, build_groups_and_talk, port=port, times=1) == [[], [], []]
    for _ in range(10):  # on a busy machine the strangers may come when nobody listens any more
        by_rank, reached = while_strangers_connect(ranks, port, says)
        assert all(len(refused) <= 1 for refused in by_rank), by_rank
        if reached:
            break
    assert reached, "the strangers found no port in time"
    assert ranks.results(3, build_groups_and_talk, port=port, times=1) == [[], [], []]
