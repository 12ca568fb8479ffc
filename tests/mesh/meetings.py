"""Ranks as threads of one process, and stores to meet in; not a test itself."""

import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from scope_rt.mesh.meeting_point import MeetingPoint
from scope_rt.mesh.rendezvous import Meeting, meet
from scope_rt.stream_secret import StreamSecret
from tests import warm_python

HOST = """
import sys, time
from scope_rt.mesh.meeting_point import host_store
store = host_store()
print(store.port, flush=True)
sys.stdin.read()
"""


class StandingClock:
    """A clock of meetings that stands until each of `num_ranks` could see what the others did.

    A rank looks around between two sleeps. However slow the machine is, no time is over before all
    have come and have looked often enough; and however few come, it is over in the end.
    """

    NUM_LOOKS, BOUND_S = 5, 60.0

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks, self._end_s = num_ranks, time.monotonic() + self.BOUND_S
        self._looks: dict[int, int] = {}
        self._lock = threading.Lock()
        self._is_over = False

    def monotonic(self) -> float:
        return math.inf if self._is_over or time.monotonic() > self._end_s else 0.0

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        rank = threading.get_ident()
        with self._lock:
            if rank not in self._looks:  # what they saw before it came does not count
                self._looks = dict.fromkeys([*self._looks, rank], 0)
            self._looks[rank] += 1
            are_here = len(self._looks) == self._num_ranks
            self._is_over |= are_here and min(self._looks.values()) > self.NUM_LOOKS


def point_at(port: int) -> MeetingPoint:
    return MeetingPoint(host="127.0.0.1", port=port, is_hosted_by_rank0=False)


@contextmanager
def store_elsewhere() -> Iterator[tuple[warm_python.Process, MeetingPoint]]:
    """A store in a process of its own."""
    (ports, its_port), (its_input, our_end) = os.pipe(), os.pipe()
    command = [sys.executable, "-c", HOST]
    process = warm_python.Process(command, stdin=its_input, stdout=its_port)
    os.close(its_port)
    os.close(its_input)
    with open(ports) as lines, open(our_end, "w"):
        try:
            yield process, point_at(int(lines.readline()))
        finally:
            process.kill()
            process.wait(20)


def meet_all(
    point: MeetingPoint,
    ranks: list[int],
    *,
    world_size: int,
    timeout_s: float = 20.0,
    late: int | None = None,
    secrets: Sequence[StreamSecret | None] = (),
) -> list[Meeting | BaseException]:
    """What each of `ranks` gets out of the meeting; `late` comes after the others.

    `secrets` are those of the ranks by number; without them, nobody has one.
    """

    def come(rank: int) -> Meeting:
        if rank == late:
            time.sleep(0.3)
        secret = secrets[rank] if secrets else None
        return meet(point, rank=rank, world_size=world_size, timeout_s=timeout_s, secret=secret)

    with ThreadPoolExecutor(len(ranks)) as pool:
        futures: list[Future[Meeting]] = [pool.submit(come, rank) for rank in ranks]
        return [future.exception() or future.result() for future in futures]


def meet_two(point: MeetingPoint, secret: StreamSecret | None = None) -> tuple[Meeting, Meeting]:
    first, second = meet_all(point, [0, 1], world_size=2, secrets=[secret, secret])
    assert isinstance(first, Meeting)
    assert isinstance(second, Meeting)
    return first, second
