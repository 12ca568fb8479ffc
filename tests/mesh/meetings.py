"""Ranks as threads of one process, and stores to meet in; not a test itself."""

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from scope_rt.mesh.rendezvous import Meeting, MeetingPoint, meet

HOST = """
import sys, time
from scope_rt.mesh.rendezvous import host_store
store = host_store()
print(store.port, flush=True)
sys.stdin.read()
"""


def point_at(port: int) -> MeetingPoint:
    return MeetingPoint(host="127.0.0.1", port=port, is_hosted_by_rank0=False)


@contextmanager
def store_elsewhere() -> Iterator[tuple[subprocess.Popen[str], MeetingPoint]]:
    """A store in a process of its own."""
    command = [sys.executable, "-c", HOST]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, point_at(int(process.stdout.readline()))
        finally:
            process.kill()


def meet_all(
    point: MeetingPoint,
    ranks: list[int],
    *,
    world_size: int,
    timeout_s: float = 20.0,
    late: int | None = None,
) -> list[Meeting | BaseException]:
    """What each of `ranks` gets out of the meeting; `late` comes after the others."""

    def come(rank: int) -> Meeting:
        if rank == late:
            time.sleep(0.3)
        return meet(point, rank=rank, world_size=world_size, timeout_s=timeout_s)

    with ThreadPoolExecutor(len(ranks)) as pool:
        futures: list[Future[Meeting]] = [pool.submit(come, rank) for rank in ranks]
        return [future.exception() or future.result() for future in futures]


def meet_two(point: MeetingPoint) -> tuple[Meeting, Meeting]:
    first, second = meet_all(point, [0, 1], world_size=2)
    assert isinstance(first, Meeting)
    assert isinstance(second, Meeting)
    return first, second
