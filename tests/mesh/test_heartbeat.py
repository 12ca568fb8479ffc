"""A silent rank or store is named by all, and nobody else is."""

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

import pytest

from scope_contracts.errors import (
    FingerprintError,
    IntegrityError,
    LinkError,
    LinkTimeoutError,
    PeerLostError,
    PeerRefusedError,
    UserInputError,
)
from scope_rt.mesh.failures import Liveness
from scope_rt.mesh.heartbeat import Heartbeat, closed_by
from scope_rt.mesh.meeting_point import MeetingPoint, host_store
from scope_rt.mesh.rendezvous import Meeting
from tests.mesh.meetings import meet_two, point_at, store_elsewhere

BOUND_S = 1.0


@dataclass
class Pulse:
    """A heartbeat and what it did."""

    heartbeat: Heartbeat
    aborted: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def of(cls, meeting: Meeting, *, start_s: float = 20.0) -> "Pulse":
        aborted, over = threading.Event(), threading.Event()
        heartbeat = Heartbeat(
            meeting,
            bound_s=BOUND_S,
            start_s=start_s,
            abort=lambda failure: aborted.set(),
            is_over=over.is_set,
        )
        return cls(heartbeat, aborted, over)


@pytest.fixture
def pulses() -> Iterator[tuple[Pulse, Pulse]]:
    store = host_store()
    first, second = (Pulse.of(meeting) for meeting in meet_two(point_at(store.port)))
    yield first, second
    first.heartbeat.stop()
    second.heartbeat.stop()


def test_a_silent_rank_is_named_and_waits_for_it_end(pulses: tuple[Pulse, Pulse]) -> None:
    listener, _ = pulses
    listener.heartbeat.start()
    assert listener.aborted.wait(2 * BOUND_S)
    with pytest.raises(LinkTimeoutError, match=r"^rank 1 sent no heartbeat for [01]\.\d s; see"):
        listener.heartbeat.check()


def test_ranks_that_beat_and_ranks_that_leave_in_order_are_not_reported(
    pulses: tuple[Pulse, Pulse],
) -> None:
    stays, leaves = pulses
    stays.heartbeat.start()
    leaves.heartbeat.start()
    assert not stays.aborted.wait(1.5 * BOUND_S)
    leaves.heartbeat.stop()
    assert not stays.aborted.wait(2 * BOUND_S)
    assert stays.heartbeat.lost is None
    assert leaves.heartbeat.lost is None


def test_the_first_failure_reported_is_what_all_ranks_report(pulses: tuple[Pulse, Pulse]) -> None:
    first, second = (pulse.heartbeat for pulse in pulses)
    symptom = LinkError("something broke")
    assert second.cause_of(symptom) is symptom
    assert str(first.report(closed_by([7]))) == str(closed_by([7]))
    errors = [second.cause_of(symptom), second.report(closed_by([0])), first.cause_of(symptom)]
    assert [str(error) for error in errors] == [str(closed_by([7]))] * 3
    assert all(isinstance(error, PeerLostError) for error in errors)


def test_what_a_rank_cannot_use_is_told_from_its_loss_and_not_quoted(
    pulses: tuple[Pulse, Pulse],
) -> None:
    first, second = (pulse.heartbeat for pulse in pulses)
    first.report_own(UserInputError("prompt: 'a secret' is not known"))
    error = second.cause_of(LinkError("something broke"))
    assert type(error) is PeerRefusedError
    assert error.args == ("rank 0 failed with UserInputError",)


def test_what_a_rank_found_wrong_is_not_taken_for_its_loss(pulses: tuple[Pulse, Pulse]) -> None:
    first, second = (pulse.heartbeat for pulse in pulses)
    said = "chunk 7: rank 1: weight a is not what was loaded"
    first.report(FingerprintError(said))
    with (
        pytest.raises(IntegrityError) as raised,
        Liveness(second).named_failures("receive", peer=1),
    ):
        raise RuntimeError("Connection closed by peer")
    assert raised.value.args == (said,)
    with pytest.raises(IntegrityError):
        second.check()


@pytest.mark.parametrize("ending", ["stopped", "over"])
def test_nothing_is_aborted_once_the_groups_are_gone(
    pulses: tuple[Pulse, Pulse], ending: str
) -> None:
    listener, _ = pulses
    listener.heartbeat.start()
    if ending == "over":
        listener.over.set()
    else:
        listener.heartbeat.stop()
    assert not listener.aborted.wait(2 * BOUND_S)
    assert listener.heartbeat.lost is None


@pytest.mark.parametrize("signum", [signal.SIGSTOP, signal.SIGKILL])
def test_a_store_that_does_not_answer_is_named(signum: signal.Signals) -> None:
    with store_elsewhere() as (process, point):
        pulse = Pulse.of(meet_two(point)[0])
        pulse.heartbeat.start()
        time.sleep(0.3)
        os.kill(process.pid, signum)
        started_s = time.monotonic()
        assert pulse.aborted.wait(6 * BOUND_S)
        assert time.monotonic() - started_s < 4 * BOUND_S
        said = str(pulse.heartbeat.lost)
        assert re.match(r"the store at 127.0.0.1:\d+ did not answer for [01]\.\d s", said)
        pulse.heartbeat.stop()


def test_a_store_that_was_stopped_after_the_meeting_is_not_waited_for() -> None:
    with store_elsewhere() as (process, point), ThreadPoolExecutor(1) as pool:
        meeting, _ = meet_two(point)
        os.kill(process.pid, signal.SIGSTOP)
        try:
            pulse = pool.submit(Pulse.of, meeting, start_s=1.0)
            with pytest.raises(LinkTimeoutError, match=f"{point.port} does not answer"):
                pulse.result(timeout=30)
        finally:
            os.kill(process.pid, signal.SIGCONT)


@contextmanager
def late_at_first(port: int, delay_s: float) -> Iterator[MeetingPoint]:
    """The store at `port`, of which every new connection hears nothing for `delay_s`."""

    def forward(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(4096):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def serve(client: socket.socket) -> None:
        time.sleep(delay_s)
        with client, socket.create_connection(("127.0.0.1", port)) as store:
            questions = threading.Thread(target=forward, args=(client, store))
            questions.start()
            forward(store, client)
            questions.join()

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=server.accept()[:1]).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield point_at(server.getsockname()[1])
        finally:
            server.shutdown(socket.SHUT_RDWR)
            accepting.join()


def test_the_first_answer_may_take_longer_than_silence_may() -> None:
    store = host_store()
    meeting, _ = meet_two(point_at(store.port))
    with late_at_first(store.port, delay_s=3 * BOUND_S) as point:
        pulse = Pulse.of(replace(meeting, point=point))
        symptom = LinkError("something broke")
        assert pulse.heartbeat.cause_of(symptom) is symptom


def test_no_late_answer_of_a_store_is_read_as_the_answer_to_a_later_question() -> None:
    with store_elsewhere() as (process, point):
        pulse = Pulse.of(meet_two(point)[0])
        pulse.heartbeat.start()
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGSTOP)
        assert pulse.aborted.wait(6 * BOUND_S)
        pulse.heartbeat.stop()
        os.kill(process.pid, signal.SIGCONT)  # it answers what it was asked meanwhile
        time.sleep(0.3)
        pulse.heartbeat._lost = None  # as for a main thread that asks before the other one is done
        symptom = closed_by([1])
        assert pulse.heartbeat.cause_of(symptom) is symptom
        assert pulse.heartbeat.report(symptom) is symptom


class SlowStore:
    """Answers every call after `latency_s`; nobody but the caller ever beats in it."""

    def __init__(self, latency_s: float) -> None:
        self._latency_s = latency_s

    def set(self, key: str, value: bytes) -> None:
        time.sleep(self._latency_s)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        time.sleep(self._latency_s)
        return expected or desired


def test_a_slow_store_does_not_stretch_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Meeting, "connect", lambda meeting, timeout_s, reads_s: SlowStore(0.25))
    store = host_store()
    pulse = Pulse.of(meet_two(point_at(store.port))[0])
    pulse.heartbeat.start()
    assert pulse.aborted.wait(4 * BOUND_S)
    assert "rank 1 sent no heartbeat" in str(pulse.heartbeat.lost)
    pulse.heartbeat.stop()
