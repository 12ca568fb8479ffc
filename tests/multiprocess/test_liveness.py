"""Whoever waits for a lost rank learns its number, on every rank, and nobody else is blamed."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from scope_contracts.envelope import PlanId
from scope_contracts.errors import CacheError, LinkError, PeerLostError
from scope_rt.config import MeshConfig, StreamConfig
from scope_rt.launch_environment import LaunchEnvironment
from scope_rt.mesh.meeting_point import MeetingPoint, host_store
from scope_rt.mesh.process_group import ProcessGroups, World, join_world
from scope_rt.session import StreamSession
from scope_rt.stream_secret import StreamSecret
from scope_rt.topology import Topology
from tests.multiprocess.ranks import Ranks, free_port

BOUND_S = 2.0
PP0 = Topology(plan_id=PlanId.PP0, tp_degree=2)
"""Rank0, the leader 1, its follower 2."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A store that all starts of this module share, as under a launcher."""
    store = host_store()
    yield store.port
    del store


def join(
    port: int,
    *,
    bound_s: float = BOUND_S,
    hosted: bool = True,
    start_s: float = 20.0,
    secret: StreamSecret | None = None,
) -> World:
    environment = LaunchEnvironment(
        launched=True,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        master_addr="127.0.0.1",
        master_port=port,
        store_is_hosted=hosted,
        secret=secret,
    )
    config = MeshConfig(
        heartbeat_timeout_s=bound_s, start_timeout_s=start_s, group_timeout_s=start_s
    )
    return join_world(environment, config)


def wait_for_a_peer(groups: ProcessGroups, wait: str) -> None:
    """Rank0 waits for a chunk; the leader for an envelope, or for its follower in a sum."""
    if wait == "sum" and groups.sums is not None:
        groups.sums.all_reduce_sum(torch.ones(2))
    elif groups.link is not None:
        peer = 1 - int(os.environ["RANK"])
        groups.link.receive(torch.empty(2), source=peer, begins=True)
    else:
        assert groups.mesh is not None
        groups.mesh.receive(torch.empty(2), source=1, begins=True)


def stop_rank_2(port: int, wait: str) -> str:
    """The last rank is stopped while the others wait for each other, or for it.

    Who notices that last wakes it again: until then, nobody's wait may end otherwise.
    """
    world = join(port)
    groups = world.build_groups(PP0)
    pids = [int(pid) for pid in world.exchange(str(os.getpid()).encode())]
    point = MeetingPoint(host="127.0.0.1", port=port, is_hosted_by_rank0=False)
    noticed = point.connect(deadline_s=time.monotonic() + 20.0)
    world.heartbeat.start()
    try:
        if pids[2] == os.getpid():
            os.kill(os.getpid(), signal.SIGSTOP)
        wait_for_a_peer(groups, wait)
    except LinkError as error:
        if os.getpid() != pids[2] and noticed.add(f"noticed/{wait}", 1) == 2:
            os.kill(pids[2], signal.SIGCONT)
        return f"{type(error).__name__}: {error}"
    finally:
        world.leave()
    return "nothing was noticed"


@pytest.mark.parametrize(
    ("wait", "of_rank_1"), [("message", "receive from rank 0"), ("sum", "all_reduce in the gen")]
)
def test_a_stopped_rank_is_named_by_all_ranks(
    ranks: Ranks, port: int, wait: str, of_rank_1: str
) -> None:
    said = ranks.results(3, stop_rank_2, port=port, wait=wait)
    assert said[0].startswith("LinkTimeoutError: receive from rank 1: rank 2 sent no heartbeat")
    assert said[1].startswith(f"LinkTimeoutError: {of_rank_1}")
    assert all("rank 2 sent no heartbeat for" in sentence for sentence in said), said


def lose_rank_2(port: int, wait: str) -> str:
    """The last rank's connections end, as when it dies."""
    world = join(port)
    groups = world.build_groups(PP0)
    world.heartbeat.start()
    try:
        if os.environ["RANK"] == "2":
            return ""
        wait_for_a_peer(groups, wait)
    except LinkError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        world.leave()
    return "nothing was noticed"


def test_a_closed_connection_is_blamed_on_who_closed_it_by_all_ranks(
    ranks: Ranks, port: int
) -> None:
    rank0, rank1, _ = ranks.results(3, lose_rank_2, port=port, wait="sum")
    assert rank1.startswith("PeerLostError: all_reduce in the generator group: rank 2 closed the")
    assert rank0.startswith("PeerLostError: receive from rank 1: rank 2 closed the connection")


def freeze_together(port: int) -> str | None:
    """Ranks 1 and 2 are stopped by rank0, and rank 2 wakes before rank 1 can beat again."""
    world = join(port)
    pids = [int(pid) for pid in world.exchange(str(os.getpid()).encode())]
    world.heartbeat.start()
    if os.environ["RANK"] == "0":
        world.heartbeat.stop()  # it would rightly miss them
        time.sleep(BOUND_S / 2)
        os.kill(pids[1], signal.SIGSTOP)
        time.sleep(BOUND_S / 4)  # rank 2 has heard all that rank 1 said
        os.kill(pids[2], signal.SIGSTOP)
        time.sleep(2 * BOUND_S)
        os.kill(pids[2], signal.SIGCONT)
        time.sleep(BOUND_S / 4)
        os.kill(pids[1], signal.SIGCONT)
    world.exchange(b"awake")
    time.sleep(BOUND_S)
    world.exchange(b"still well")
    lost = world.heartbeat.lost
    world.leave()
    return None if lost is None else str(lost)


def test_a_process_that_was_stopped_itself_accuses_nobody(ranks: Ranks, port: int) -> None:
    assert ranks.results(3, freeze_together, port=port) == [None, None, None]


def exchange_in_a_new_world(port: int, times: int, hosted: bool) -> list[Any]:
    """One session after another in the same processes."""
    seen: list[Any] = []
    for attempt in range(times):
        world = join(port, hosted=hosted)
        groups = world.build_groups(PP0)
        world.heartbeat.start()
        seen.append(world.exchange(f"{attempt}".encode()))
        if groups.digests is not None and groups.sums is not None:
            seen.append(groups.digests.gather(os.environ["RANK"].encode()))
            groups.sums.all_reduce_sum(torch.ones(1))
            seen.append(groups.sums.wait_s > 0)
        world.leave()
    return seen


@pytest.mark.parametrize("hosted", [True, False])
def test_sessions_follow_each_other_on_one_port(ranks: Ranks, port: int, hosted: bool) -> None:
    used = port if hosted else free_port()
    rank0, *mesh = ranks.results(3, exchange_in_a_new_world, port=used, times=3, hosted=hosted)
    assert rank0 == [[b"0"] * 3, [b"1"] * 3, [b"2"] * 3]
    for seen in mesh:
        assert seen[::3] == rank0
        assert seen[1::3] == [[b"1", b"2"]] * 3
        assert seen[2::3] == [True] * 3


class Gpu:
    """Of `ProcessGroupNCCL`: what was known when it was told to end its kernels."""

    def __init__(self, world: World) -> None:
        self._world, self.known = world, list[str]()

    def abort(self) -> None:
        self.known.append(str(self._world.heartbeat.lost))
        raise RuntimeError("ProcessGroup abort timed out")

    def get_error(self) -> Any:
        raise AssertionError("no sum is awaited")


def end_the_sums_of_a_gpu(port: int) -> list[str]:
    """The follower fails; whoever waits has its GPU's sums ended, by a library that cannot."""
    world = join(port)
    groups = world.build_groups(PP0)
    world._gpu = gpu = Gpu(world)
    world.heartbeat.start()
    try:
        if os.environ["RANK"] == "2":
            world.heartbeat.report_own(CacheError("chunk 7: read past the ring"))
            time.sleep(BOUND_S)  # the others must not need its end
            return []
        with pytest.raises(PeerLostError, match="rank 2 failed with CacheError: chunk 7: read"):
            wait_for_a_peer(groups, "sum")
    finally:
        world.leave()
    return gpu.known


def test_a_rank_that_fails_ends_the_sums_of_other_gpus_once_they_know_of_it(
    ranks: Ranks, port: int
) -> None:
    *others, _ = ranks.results(3, end_the_sums_of_a_gpu, port=port)
    for known in others:
        assert known
        assert all("rank 2 failed with CacheError: chunk 7" in each for each in known), known


def count_collectives(folder: Path, plan: str, tp: int) -> int:
    """Sums and gathers of this rank from its first chunk to its last."""
    count = 0
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_gather"):
            real = getattr(dist, name)

            def counted(*arguments: Any, real: Any = real, **named: Any) -> Any:
                nonlocal count
                count += 1
                return real(*arguments, **named)

            patch.setattr(dist, name, counted)
        config = StreamConfig.load(model=folder, plan=plan, tp=tp, integrity="strict")
        with StreamSession(config) as session:
            count = 0
            list(session.stream("red circle", num_chunks=2))
            return count


def test_a_generator_rank_alone_takes_part_in_no_collective(ranks: Ranks, folder: Path) -> None:
    assert ranks.results(1, count_collectives, folder=folder, plan="single", tp=1) == [0]
    assert ranks.results(2, count_collectives, folder=folder, plan="pp0", tp=1) == [0, 0]
    rank0, *generators = ranks.results(3, count_collectives, folder=folder, plan="pp0", tp=2)
    assert rank0 == 0
    assert min(generators) > 0
