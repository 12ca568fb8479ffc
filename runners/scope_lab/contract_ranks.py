"""The parts of the contract that need two ranks: their comparison, and their heartbeat.

Each of two ranks runs `main`, and rank0 writes what it measured to the file it was given.
"""

import json
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from scope_contracts.envelope import PlanId
from scope_contracts.errors import ScopeError
from scope_lab.fuzz.seeds import DIGEST
from scope_rt.config import StreamConfig
from scope_rt.launch_environment import LaunchEnvironment
from scope_rt.mesh.heartbeat import BEATS_PER_BOUND, Heartbeat
from scope_rt.mesh.peer_check import PeerCheck
from scope_rt.mesh.process_group import join_world
from scope_rt.topology import Topology
from scope_runners.guarded import guarded
from scope_runners.launcher import launch

TOPOLOGY = Topology(plan_id=PlanId.TP_V1_1, tp_degree=2)
_COMPARISONS = 300
_BOUND_S, _LISTEN_S = 10.0, 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCosts:
    """Seconds of one comparison of two ranks, and CPU seconds of one beat of a heart."""

    compare_s: float
    beat_s: float

    @classmethod
    def measured(cls, folder: Path) -> Self:
        """Start two ranks on this machine and measure.

        Raises:
            ScopeError: they failed; they have said why.
        """
        path = folder / "ranks.json"
        code = launch(__name__, [str(path)], num_ranks=TOPOLOGY.world_size)
        if code:
            raise ScopeError(f"the two ranks to measure failed, exit code {code}")
        return cls(**json.loads(path.read_text()))


def main(argv: Sequence[str]) -> int:
    """One of the ranks."""
    return guarded(lambda: _measure(Path(argv[0])), speaker="bench_contract")


def _measure(path: Path) -> int:
    environment = LaunchEnvironment.from_environment()
    world = join_world(environment, StreamConfig.load(heartbeat_timeout_s=_BOUND_S).mesh)
    groups = world.build_groups(TOPOLOGY)
    assert groups.digests is not None, "two generator ranks compare digests"
    check = PeerCheck(
        ranks=TOPOLOGY.generator_ranks,
        rank=environment.rank,
        every=1,
        gather=groups.digests.gather,
        waited_s=lambda: 0.0,
    )
    beat_s = _beat_s(world.heartbeat)
    costs = RankCosts(compare_s=_compare_s(check), beat_s=beat_s)
    world.exchange(b"done")  # neither leaves while the other still measures
    if environment.rank == 0:
        path.write_text(json.dumps(asdict(costs)))
    world.leave()
    return 0


def _compare_s(check: PeerCheck) -> float:
    """The median; waiting for a slower rank is not in it, since both do nothing else."""
    seconds = []
    for _ in range(_COMPARISONS):
        start_s = time.perf_counter()
        check.before(DIGEST.chunk_index, lambda: DIGEST)
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds)


def _beat_s(heartbeat: Heartbeat) -> float:
    """CPU time of the heartbeat's thread; waiting for the store costs no CPU time."""
    heartbeat.start()
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "heartbeat")
    assert thread.ident is not None, "it was started"
    clock = time.pthread_getcpuclockid(thread.ident)
    start_s = time.clock_gettime(clock)
    time.sleep(_LISTEN_S)
    return (time.clock_gettime(clock) - start_s) * _BOUND_S / BEATS_PER_BOUND / _LISTEN_S
