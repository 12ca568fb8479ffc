"""What does not end within its bound is told once, and a pause of the process is nobody's fault."""

import math
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Event

import pytest

from scope_contracts.errors import ChunkTimeoutError, IntegrityError, PeerLostError, ScopeError
from scope_rt.watchdog import Watchdog

CHUNK_S, GRACE_S = 100.0, 10.0


class Told(list[ScopeError]):
    """What a watchdog told."""

    def watchdog(self) -> Watchdog:
        """Whose thread does not look: a test does."""
        watchdog = Watchdog(self.append)
        watchdog._chunk_s, watchdog._grace_s = CHUNK_S, GRACE_S
        return watchdog


def test_a_chunk_that_does_not_end_is_told_once_with_what_to_raise() -> None:
    told = Told()
    watchdog = told.watchdog()
    with watchdog.section("decoding", chunk=7):
        watchdog.look(CHUNK_S - 1)
        assert told == []
        for _ in range(3):
            watchdog.look(1.0)
    (error,) = told
    assert isinstance(error, ChunkTimeoutError)
    assert str(error).startswith("chunk 7: decoding did not end within 100 s; ")
    assert "SCOPE_START_TIMEOUT_S" in str(error)


def test_chunks_that_end_are_never_told_however_many_there_are() -> None:
    told = Told()
    watchdog = told.watchdog()
    for _ in range(5):
        with watchdog.section("decoding"):
            watchdog.look(CHUNK_S - 1)
    watchdog.look(10 * CHUNK_S)
    assert told == []


def test_what_takes_twice_as_long_as_the_last_of_its_kind_is_told_and_a_wait_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What was slow once hides neither what is slow later, nor anything else that is slow."""
    watchdog = Told().watchdog()
    for chunk, seconds in enumerate((5, 25, 25, 9, 20)):
        with watchdog.section("decoding", chunk=chunk):
            for _ in range(seconds):
                watchdog.look(1.0)
    with watchdog.section("waiting for rank 1", chunk=4, is_bounded=False, is_wait=True):
        watchdog.look(1000.0)
    with watchdog.section("planning", chunk=5):
        watchdog.look(11.0)
    assert [record.getMessage() for record in caplog.records] == [
        "chunk 1: decoding has taken 10 s so far",
        "chunk 1: decoding has taken 20 s so far",
        "chunk 4: decoding has taken 18 s so far",
        "chunk 5: planning has taken 11 s so far",
    ]


@pytest.mark.parametrize("chunk_s", [15.0, 300.0])
def test_while_chunks_are_slow_no_more_than_a_minute_goes_by_in_silence(
    chunk_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    watchdog, told_at = Told().watchdog(), [0.0]
    watchdog._chunk_s = math.inf
    for second in range(600):
        if second % chunk_s == 0:
            section = watchdog.section("decoding", chunk=second)
            section.__enter__()
        watchdog.look(1.0)
        if len(caplog.records) == len(told_at):
            told_at.append(second + 1.0)
        if (second + 1) % chunk_s == 0:
            section.__exit__(None, None, None)
    silences = [after - before for before, after in pairwise([*told_at, 600.0])]
    assert max(silences) <= 60 + min(chunk_s, 15), "and until it is clear that this one is slow too"
    assert len(told_at) <= 15, "and not a line for every chunk"


def test_others_are_told_before_this_process_may_be_ended() -> None:
    order: list[str] = []
    watchdog = Watchdog(lambda error: order.append("ended"))
    watchdog._chunk_s = CHUNK_S
    watchdog.tell_others = lambda error: order.append("told")
    with watchdog.section("generating", chunk=7):
        watchdog.look(CHUNK_S)
    assert order == ["told", "ended"]


@pytest.mark.parametrize("kind", [PeerLostError, IntegrityError])
def test_what_needs_a_group_that_failed_has_a_grace_and_the_error_of_the_group(
    kind: type[ScopeError],
) -> None:
    told = Told()
    watchdog = told.watchdog()
    watchdog.tell_others = lambda error: pytest.fail("the others know")
    with watchdog.section("generating", chunk=7, ends_with_group=True):
        watchdog.look(GRACE_S)
        watchdog.group_failed(kind("rank 2 is gone"))
        watchdog.look(GRACE_S - 1)
        assert told == []
        watchdog.look(1.0)
    (error,) = told
    assert type(error) is kind
    assert "chunk 7: generating: rank 2 is gone; it did not end within 10 s" in str(error)


def test_what_needs_no_other_rank_is_left_alone_when_the_group_fails() -> None:
    told = Told()
    watchdog = told.watchdog()
    watchdog.group_failed(PeerLostError("rank 2 is gone"))
    with watchdog.section("decoding", chunk=7):
        watchdog.look(CHUNK_S - 1)
    assert told == []


def test_a_sum_inside_a_chunk_that_hangs_does_not_hide_the_chunk() -> None:
    told = Told()
    watchdog = told.watchdog()
    with watchdog.section("generating", chunk=7):
        watchdog.look(CHUNK_S / 2)
        for _ in range(3):
            with watchdog.section("all_reduce", is_bounded=False):
                watchdog.look(CHUNK_S / 4)
    assert [str(error)[:19] for error in told] == ["chunk 7: generating"]


def test_the_thread_tells_while_the_computing_thread_is_blocked() -> None:
    is_told = Event()
    watchdog = Watchdog(lambda error: is_told.set())
    watchdog.start(chunk_s=0.2, grace_s=0.2)
    with ThreadPoolExecutor(1) as pool, watchdog.section("generating", chunk=7):
        assert pool.submit(is_told.wait, 20).result()
    watchdog.stop()


def test_time_in_which_the_process_did_not_run_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clock goes on by an hour between two looks, as after SIGSTOP and SIGCONT."""
    told, hours = Told(), iter(range(0, 3600 * 10**6, 3600))
    watchdog = told.watchdog()
    clock = time.monotonic
    monkeypatch.setattr("scope_rt.watchdog.time.monotonic", lambda: clock() + next(hours))
    watchdog.start(chunk_s=30.0, grace_s=1.0)
    with watchdog.section("generating", chunk=7):
        time.sleep(0.5)
    watchdog.stop()
    assert told == []
