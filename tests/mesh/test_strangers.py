"""A process without the secret can write to the store what it likes: no rank takes its word."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from scope_contracts.errors import AuthenticationError, LinkError, LinkTimeoutError
from scope_rt.mesh import rendezvous
from scope_rt.mesh.authentic import Key, SealedStore
from scope_rt.mesh.heartbeat import Heartbeat, closed_by
from scope_rt.mesh.meeting_point import host_store
from scope_rt.mesh.rendezvous import Meeting, Roster, meet
from scope_rt.mesh.reported import Failure, FailureKind
from scope_rt.stream_secret import StreamSecret
from tests.mesh.meetings import meet_all, meet_two, point_at
from tests.mesh.test_heartbeat import BOUND_S, Pulse

SECRET, OTHER = StreamSecret(b"a" * 32), StreamSecret(b"b" * 32)
GARBAGE = [b"", b"?", b"stranger", b"\0" * 64]


@pytest.fixture
def store() -> Iterator[TCPStore]:
    hosted = host_store()
    yield hosted
    del hosted


def as_stranger(store: TCPStore) -> Any:
    """A connection of a process that may do all that the store's protocol can."""
    return TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)


def names_of(met: list[Meeting | BaseException]) -> set[str]:
    assert all(isinstance(each, Meeting) for each in met), met
    return {each.name for each in met if isinstance(each, Meeting)}


@pytest.mark.parametrize("theirs", [None, OTHER])
def test_whoever_comes_without_the_secret_is_named(
    store: TCPStore, theirs: StreamSecret | None
) -> None:
    """A stranger with this very package, or a rank that was given another secret."""
    point = point_at(store.port)
    secrets = [SECRET, theirs, SECRET]
    met = meet_all(point, [0, 1, 2], world_size=3, timeout_s=1.0, secrets=secrets)
    assert [type(each) for each in met] == [AuthenticationError] * 3
    said = ["rank 1 did not", "ranks 0, 2 did not", "rank 1 did not"]
    for error, start in zip(met, said, strict=True):
        assert str(error).startswith(f"meeting the other ranks: {start} come with this stream's")
        assert "give every rank the same SCOPE_STREAM_SECRET; see runbooks/strangers" in str(error)


def test_ranks_meet_while_a_stranger_comes_as_one_of_them(store: TCPStore) -> None:
    point = point_at(store.port)
    stranger = threading.Thread(
        target=meet_all, args=(point, [1]), kwargs={"world_size": 2, "timeout_s": 2.0}
    )
    stranger.start()
    met = meet_all(point, [0, 1], world_size=2, late=1, secrets=[SECRET, SECRET])
    stranger.join(30)
    assert len(names_of(met)) == 1


def test_a_rank_that_has_met_all_confirms_again_what_a_stranger_writes_over(
    store: TCPStore,
) -> None:
    """Another rank may still wait to read it: it would wait until the start timeout is over."""
    first, second = meet_two(point_at(store.port), SECRET)
    read_by_second = SealedStore(second.store, second.key.derive("met"))
    with first.confirming(first.connect(timeout_s=5.0, reads_s=5.0)):
        for garbage in GARBAGE:
            as_stranger(store).set(f"{first.name}/met/0", garbage)
            deadline_s = time.monotonic() + 20.0
            while read_by_second.read("met/0") is None:
                assert time.monotonic() < deadline_s, "rank 0 says it no more"
                time.sleep(0.01)


def forge(store: Any, tokens: tuple[str, ...] = ("stranger", "stranger")) -> None:
    """All that a meeting reads, in the form it has without a secret."""
    key = Key.of(None)
    values = SealedStore(store, key.derive("meeting"))
    roster = Roster(tokens=tokens).encode()
    for rank, token in enumerate(tokens):
        values.write(f"scope/join/{rank}", token.encode())
    values.write("scope/roster", roster)
    SealedStore(store, key.derive("run")).write("scope/run", b"the run of a stranger")


def litter(store: Any) -> None:
    """Garbage where the ranks look."""
    for data in GARBAGE:
        for name in ("join/0", "join/1", "roster", "run"):
            store.set(f"scope/{name}", data)


def wipe(store: Any) -> None:
    """Delete all that ranks wrote."""
    for name in ("join/0", "join/1", "roster", "run"):
        store.delete_key(f"scope/{name}")


@pytest.mark.parametrize("attack", [forge, litter, wipe])
def test_what_a_stranger_writes_while_ranks_meet_costs_time_alone(
    store: TCPStore, attack: Callable[[Any], None]
) -> None:
    stranger, ends_s = as_stranger(store), time.monotonic() + 1.0

    def keep_on() -> None:
        while time.monotonic() < ends_s:
            attack(stranger)

    attacking = threading.Thread(target=keep_on)
    attacking.start()
    met = meet_all(point_at(store.port), [0, 1], world_size=2, secrets=[SECRET, SECRET])
    attacking.join(30)
    assert len(names_of(met)) == 1
    runs = {each.run_id for each in met if isinstance(each, Meeting)}
    assert "the run of a stranger" not in runs
    again = meet_two(point_at(store.port), SECRET)
    assert again[0].run_id == again[1].run_id != "the run of a stranger"


def test_a_roster_that_a_stranger_writes_over_once_rank0_has_met_all_holds_nobody_up(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank0 has left the meeting then, and writes it no more."""
    has_confirmed, stranger = rendezvous._Confirmations.has, as_stranger(store)
    rank0_has_met = threading.Event()

    def wait_for_the_stranger(confirmations: Any, rank: int) -> bool:
        is_confirmed = has_confirmed(confirmations, rank)
        if is_confirmed and rank == 1 and threading.current_thread() is follower:
            is_there = rank0_has_met.is_set()
            assert rank0_has_met.wait(20)
            return is_there
        return is_confirmed

    met: list[Meeting] = []
    monkeypatch.setattr(rendezvous._Confirmations, "has", wait_for_the_stranger)
    point = point_at(store.port)
    how: dict[str, Any] = {"world_size": 2, "timeout_s": 20.0, "secret": SECRET}
    follower = threading.Thread(target=lambda: met.append(meet(point, rank=1, **how)))
    follower.start()
    met.append(meet(point, rank=0, **how))
    forge(stranger)
    rank0_has_met.set()
    follower.join(30)
    assert len(names_of([*met])) == 1
    assert len(met) == 2


def test_a_meeting_that_is_played_back_is_no_meeting(store: TCPStore) -> None:
    """With the very values of an earlier start, its confirmations too."""
    point, stranger = point_at(store.port), as_stranger(store)
    first = meet_two(point, SECRET)[0]
    names = ["scope/join/0", "scope/join/1", "scope/roster"]
    names += [f"{first.name}/met/{rank}" for rank in range(2)]
    recorded = {name: stranger.get(name) for name in names}
    (alone,) = meet_all(point, [0], world_size=2, timeout_s=0.5, secrets=[SECRET])
    assert isinstance(alone, LinkTimeoutError)
    for name, data in recorded.items():
        stranger.set(name, data)
    (alone,) = meet_all(point, [0], world_size=2, timeout_s=0.5, secrets=[SECRET])
    assert isinstance(alone, LinkTimeoutError), "it took an earlier process for rank 1"
    for name, data in recorded.items():
        stranger.set(name, data)
    second = meet_two(point, SECRET)[0]
    assert second.name != first.name
    assert second.key != first.key


def beats_of(meeting: Meeting) -> SealedStore:
    return SealedStore(meeting.store, meeting.key.derive("heartbeat"))


def beat(count: int) -> bytes:
    return count.to_bytes(8, "little")


def raw_beat(store: Any, first: Meeting, other: Meeting) -> None:
    store.set("beat/1", str(2**41))  # what once counted as a rank that had left in order


def unsealed_end(store: Any, first: Meeting, other: Meeting) -> None:
    store.set("beat/1", b"\0" * 32 + beat(2**64 - 1))


def sealed_by_a_stranger(store: Any, first: Meeting, other: Meeting) -> None:
    SealedStore(store, Key.of(None).derive("heartbeat")).write("beat/1", beat(2**64 - 1))


def of_an_earlier_start(store: Any, first: Meeting, other: Meeting) -> None:
    sealed = other.key.derive("heartbeat").seal("beat/1", beat(2**64 - 1))
    store.set("beat/1", sealed)


def of_another_rank(store: Any, first: Meeting, other: Meeting) -> None:
    own = first.store.get("beat/0") if first.store.check(["beat/0"]) else b""
    store.set("beat/1", own)


def played_back(store: Any, first: Meeting, other: Meeting) -> None:
    count = 2 + int(time.monotonic() / (BOUND_S / 10)) % 2  # those it has seen, in turn
    store.set("beat/1", first.key.derive("heartbeat").seal("beat/1", beat(count)))


@pytest.mark.parametrize(
    "forge_beat",
    [
        raw_beat,
        unsealed_end,
        sealed_by_a_stranger,
        of_an_earlier_start,
        of_another_rank,
        played_back,
    ],
)
def test_nobody_beats_for_a_silent_rank(
    store: TCPStore, forge_beat: Callable[[Any, Meeting, Meeting], None]
) -> None:
    point = point_at(store.port)
    earlier = meet_two(point, SECRET)[0]
    meeting, _ = meet_two(point, SECRET)
    beats_of(meeting).write("beat/1", beat(3))
    pulse, is_over = Pulse.of(meeting), threading.Event()

    def keep_on() -> None:
        while not is_over.wait(BOUND_S / 40):
            forge_beat(meeting.store, meeting, earlier)

    attacking = threading.Thread(target=keep_on)
    attacking.start()
    pulse.heartbeat.start()
    assert pulse.aborted.wait(3 * BOUND_S), "the silence of rank 1 went unnoticed"
    is_over.set()
    attacking.join(30)
    assert isinstance(pulse.heartbeat.lost, LinkTimeoutError)
    assert str(pulse.heartbeat.lost).startswith("rank 1 sent no heartbeat")
    pulse.heartbeat.stop()


def test_a_stranger_who_wipes_beats_now_and_then_loses_nobody(store: TCPStore) -> None:
    meetings = meet_two(point_at(store.port), SECRET)
    pulses, stranger = [Pulse.of(meeting) for meeting in meetings], meetings[0].store
    for pulse in pulses:
        pulse.heartbeat.start()
    ends_s = time.monotonic() + 2 * BOUND_S
    while time.monotonic() < ends_s:
        stranger.set("beat/0", "nobody")
        stranger.delete_key("beat/1")
        time.sleep(BOUND_S / 3)
    assert [pulse.heartbeat.lost for pulse in pulses] == [None, None]
    for pulse in pulses:
        pulse.heartbeat.stop()


def garbage_failure(store: Any, earlier: Meeting) -> None:
    store.set("failure", b"garbage")


def plain_failure(store: Any, earlier: Meeting) -> None:
    store.set("failure", Failure(kind=FailureKind.CLOSED, text="rank 0 closed").encode())


def played_back_failure(store: Any, earlier: Meeting) -> None:
    failure = Failure(kind=FailureKind.CLOSED, text="rank 0 closed").encode()
    store.set("failure", earlier.key.derive("heartbeat").seal("failure", failure))


@pytest.mark.parametrize("report", [garbage_failure, plain_failure, played_back_failure])
def test_a_failure_that_no_rank_reported_is_none(
    store: TCPStore, report: Callable[[Any, Meeting], None], caplog: pytest.LogCaptureFixture
) -> None:
    point = point_at(store.port)
    earlier = meet_two(point, SECRET)[0]
    meetings = meet_two(point, SECRET)
    report(meetings[0].store, earlier)
    beats: list[Heartbeat] = [Pulse.of(meeting).heartbeat for meeting in meetings]
    symptom = LinkError("something broke")
    assert [each.cause_of(symptom) for each in beats] == [symptom, symptom]
    assert "the store's failure was not written by a rank that knows this" in caplog.text
    assert str(beats[0].report(closed_by([1]))) == str(closed_by([1]))
    assert str(beats[1].cause_of(symptom)) == str(closed_by([1]))


def test_strangers_who_connect_flood_or_say_half_a_message_stop_no_meeting(
    store: TCPStore,
) -> None:
    """Each keeps its connection open; the store answers the ranks meanwhile."""
    half = [b"", b"\x00", b"\x09\x3c\x85\x5c", b"\x01" * 7, b"GET /\r\n\r\n", b"\xff" * 65536]
    with ExitStack() as connections:
        for number in range(120):
            stranger = socket.create_connection(("127.0.0.1", store.port), timeout=5)
            connections.enter_context(stranger)
            with suppress(OSError):  # the store has refused it
                stranger.sendall(half[number % len(half)])
        pulses = [Pulse.of(meeting) for meeting in meet_two(point_at(store.port), SECRET)]
        for pulse in pulses:
            pulse.heartbeat.start()
        time.sleep(1.5 * BOUND_S)
        assert [pulse.heartbeat.lost for pulse in pulses] == [None, None]
        for pulse in pulses:
            pulse.heartbeat.stop()
