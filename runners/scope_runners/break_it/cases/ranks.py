"""Faults 17 to 21: ranks that are killed, stopped, slow, cut off or raise, in each of their roles.

After each of these the group restarts by itself, and no chunk is lost or emitted twice.
"""

from collections.abc import Iterator
from dataclasses import replace
from enum import StrEnum
from functools import partial

from scope_contracts.envelope import PlanId
from scope_rt.faults import FaultPoint
from scope_rt.topology import Topology
from scope_runners.break_it.faults import Fault, at
from scope_runners.break_it.job import Script, ScriptEvent
from scope_runners.break_it.observation import KILLED, STOPPED
from scope_runners.break_it.scenario import (
    DEAD_S,
    FAULT_CHUNK,
    IN_ORDER,
    PEER_LOST,
    PP0,
    PP1_TP2,
    TP2,
    WITH_START_FRAME,
    Case,
    Expected,
    Pace,
    Role,
    Scenario,
    last_generator,
    lost,
    refused_by,
    refused_by_generators,
)

SLOWER = 10
"""How many times slower the slow rank is, at least."""
SLOW_FACTOR = 4
SHORTEST_DELAY_S = 0.1
"""Far above what a busy machine adds to a generator call."""


class Phase(StrEnum):
    """What the rank is at when it dies."""

    IDLE = "idle"
    DENOISE = "denoise"
    RECOMPUTE = "recompute"
    SEND = "send"


def _kill(role: Role, phase: Phase, topology: Topology, pace: Pace) -> Scenario | None:
    rank = role.rank_in(topology)
    if rank is None:
        return None
    events = (ScriptEvent(chunk=FAULT_CHUNK, recompute=True),) if phase is Phase.RECOMPUTE else ()
    return Scenario(
        topology=topology,
        script=Script(events=events),
        faults=(_death(rank, phase, topology, pace),),
        expected=lost(rank, topology, KILLED, within_s=DEAD_S),
    )


def _death(rank: int, phase: Phase, topology: Topology, pace: Pace) -> Fault:
    kill = partial(at, rank=rank, chunk=FAULT_CHUNK, action="kill")
    generates = rank in topology.generator_ranks
    match phase:
        case Phase.IDLE:
            return kill(point=FaultPoint.IDLE if rank else FaultPoint.EMIT)
        case Phase.DENOISE if generates:
            return kill(point=FaultPoint.CALL)
        case Phase.RECOMPUTE if generates:
            return kill(point=FaultPoint.RECOMPUTE)
        case Phase.SEND if topology.plan_id is PlanId.TP_V0 and rank == 0:
            return kill(point=FaultPoint.FRAMES)  # its messages have no tensors to withhold
        case Phase.SEND if rank in (0, topology.leader):
            return kill(point=FaultPoint.FRAMES, action="kill_in_message")
        case Phase.SEND:  # a follower never sends: it dies when it has just been sent a chunk
            return kill(point=FaultPoint.ENTERED)
        case _:  # rank0 waits while the mesh works
            return kill(point=FaultPoint.SENDING, after_s=pace.chunk_s / 10)


def _kill_with_start_frame(role: Role, topology: Topology, pace: Pace) -> Scenario | None:
    """The picture is gone by then: the ranks that start again have its latents from the log."""
    scenario = _kill(role, Phase.SEND, topology, pace)
    return None if scenario is None else replace(scenario, script=WITH_START_FRAME)


def _stop(role: Role, topology: Topology, pace: Pace) -> Scenario | None:
    rank = role.rank_in(topology)
    if rank is None:
        return None
    point = FaultPoint.CALL if rank in topology.generator_ranks else FaultPoint.EMIT
    return Scenario(
        topology=topology,
        faults=(at(rank=rank, chunk=FAULT_CHUNK, point=point, action="stop"),),
        expected=lost(rank, topology, STOPPED, within_s=pace.heartbeat_s),
    )


def _slow(topology: Topology, pace: Pace) -> Scenario:
    """Beside others, a rank is slow from the start; alone, it becomes slower than it was."""
    rank, delay_s = (
        last_generator(topology),
        max(SHORTEST_DELAY_S, SLOWER * pace.chunk_s / pace.num_calls),
    )
    beside_others = topology.tp_degree > 1
    return Scenario(
        topology=topology,
        shared={"SCOPE_SLOW_RANK_FACTOR": str(SLOW_FACTOR)},
        faults=(
            at(
                rank=rank,
                chunk=0 if beside_others else FAULT_CHUNK,
                point=FaultPoint.CALL,
                action="delay",
                times=10**6,
                seconds=delay_s,
            ),
        ),
        expected=replace(
            refused_by_generators(topology, "SlowRankError"),
            within_s=100 * delay_s,
            names=dict.fromkeys(topology.generator_ranks, rf"\brank {rank} computes"),
            resumes=True,
        ),
    )


def _raise(role: Role, topology: Topology, pace: Pace) -> Scenario | None:
    rank = role.rank_in(topology)
    if rank is None:
        return None
    others = PEER_LOST | IN_ORDER if rank == 0 else PEER_LOST
    point = FaultPoint.EMIT if rank == 0 else FaultPoint.ENTERED
    return Scenario(
        topology=topology,
        faults=(at(rank=rank, chunk=FAULT_CHUNK, point=point, action="raise"),),
        expected=replace(
            refused_by(rank, topology, "ZeroDivisionError", others=others),
            within_s=DEAD_S,
            resumes=True,
        ),
    )


def _kills() -> Iterator[Case]:
    for role in Role:
        for phase in Phase:
            yield Case(
                number=17,
                name=f"kill/{role}/{phase}",
                description=f"SIGKILL of the {role}, at: {phase}",
                default_topology=PP1_TP2,
                build=partial(_kill, role, phase),
            )
    for role in Role:
        yield Case(
            number=17,
            name=f"kill-picture/{role}",
            description=f"SIGKILL of the {role} of a stream that began with a picture",
            default_topology=PP1_TP2,
            build=partial(_kill_with_start_frame, role),
        )


PAUSE_S = 0.25
"""Between two chunks, so that the connection is cut in the middle of a stream."""
FAR_IS_SILENT = r"\branks? 1(, \d+)* sent no heartbeat"
STORE_IS_SILENT = r"did not answer|\branks? [1-9][\d, ]* closed the connection"
"""What each host says of the cut; on the far one a rank may also see its neighbour leave first."""


def _cut(topology: Topology, pace: Pace) -> Scenario | None:
    if topology.world_size == 1:
        return None
    _, *far = range(topology.world_size)
    return Scenario(
        topology=topology,
        cuts_connection=True,
        pause_s=PAUSE_S,
        expected=Expected(
            headline=f"LinkTimeoutError {' '.join(map(str, (0, *far)))}",
            ends=(PEER_LOST,) * topology.world_size,
            within_s=pace.heartbeat_s,
            names={0: FAR_IS_SILENT, **dict.fromkeys(far, STORE_IS_SILENT)},
            resumes=True,
        ),
    )


CASES = (
    *_kills(),
    *(
        Case(
            number=18,
            name=f"stop/{role}",
            description=f"SIGSTOP of the {role}",
            default_topology=PP1_TP2,
            build=partial(_stop, role),
        )
        for role in Role
    ),
    Case(
        number=20,
        name="slow-rank",
        description=f"one rank is {SLOWER} times slower than the others",
        default_topology=TP2,
        build=_slow,
    ),
    *(
        Case(
            number=21,
            name=f"user-code/{role}",
            description=f"an exception in user code on the {role}",
            default_topology=PP1_TP2,
            build=partial(_raise, role),
        )
        for role in Role
    ),
    Case(
        number=19,
        name="cable-cut",
        description="no packet passes between two hosts for a while",
        default_topology=PP0,
        build=_cut,
    ),
)
