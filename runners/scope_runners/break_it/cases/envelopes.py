"""Faults 2, 5, 11, 12, 15 and 16: envelopes that are wrong, or right on one side only."""

from functools import partial

from scope_rt.faults import FaultPoint
from scope_rt.topology import Topology
from scope_runners.break_it.faults import at
from scope_runners.break_it.scenario import (
    FAULT_CHUNK,
    IN_ORDER,
    PEER_LOST,
    PP0,
    PP1,
    PP1_TP2,
    TP2,
    Case,
    Expected,
    Pace,
    Scenario,
    broken_at,
    first_receiver,
    last_generator,
    refused_by,
    refused_by_generators,
)

RARELY_COMPARED = {"SCOPE_DIGEST_EVERY": "64"}
"""No comparison is due where the fault happens."""


def _count(instead: int, topology: Topology, pace: Pace) -> Scenario:
    rank = last_generator(topology)
    expected = refused_by(rank, topology, "CallCountError")
    point = FaultPoint.CALL
    return broken_at(topology, expected, rank=rank, point=point, action="count", instead=instead)


def _longer_schedule(topology: Topology, pace: Pace) -> Scenario:
    rank = last_generator(topology)
    return broken_at(
        topology,
        refused_by(rank, topology, "CallCountError"),
        rank=rank,
        point=FaultPoint.ENTERED,
        action="lengthen_steps",
        shared=RARELY_COMPARED,
        is_planned=False,
    )


def _start_frame(
    point: FaultPoint, action: str, rank: int, expected: Expected, topology: Topology
) -> Scenario:
    return broken_at(
        topology, expected, rank=rank, point=point, action=action, current_start_frame=1
    )


def _start_frame_planned(topology: Topology, pace: Pace) -> Scenario:
    expected = refused_by(0, topology, "StartFrameError", others=IN_ORDER)
    return _start_frame(FaultPoint.PLANNED, "shift", 0, expected, topology)


def _start_frame_sent(topology: Topology, pace: Pace) -> Scenario | None:
    if not topology.pipelined:
        return None
    expected = refused_by(topology.leader, topology, "StartFrameError")
    return _start_frame(FaultPoint.SENDING, "shift_sent", 0, expected, topology)


def _start_frame_on_one_rank(topology: Topology, pace: Pace) -> Scenario:
    rank = last_generator(topology)
    expected = refused_by(rank, topology, "StartFrameError")
    return _start_frame(FaultPoint.ENTERED, "shift", rank, expected, topology)


def _bias_on_one_rank(topology: Topology, pace: Pace) -> Scenario:
    return broken_at(
        topology,
        _ranks_differ(topology, "ParityError"),
        rank=last_generator(topology),
        point=FaultPoint.ENTERED,
        action="edit",
        kv_cache_attention_bias=0.5,
    )


def _steps_on_one_rank(topology: Topology, pace: Pace) -> Scenario:
    return broken_at(
        topology,
        _ranks_differ(topology, "ParityError", "CallCountError"),
        rank=last_generator(topology),
        point=FaultPoint.ENTERED,
        action="lengthen_steps",
        is_planned=True,
    )


def _ranks_differ(topology: Topology, *errors: str) -> Expected:
    """Generator ranks find each other out; a single one is found out by rank0, from its answer."""
    if topology.tp_degree > 1:
        return refused_by_generators(topology, *errors)
    return refused_by(0, topology, *errors, others=PEER_LOST | IN_ORDER)


def _version(topology: Topology, pace: Pace) -> Scenario | None:
    receiver = first_receiver(topology)
    if receiver is None:
        return None
    expected = refused_by(receiver, topology, "VersionError")
    point = FaultPoint.FRAMES
    return broken_at(topology, expected, rank=0, point=point, action="set_version", version=99)


def _resent(action: str, topology: Topology, pace: Pace) -> Scenario | None:
    """An envelope comes twice: at once, or after the one that should come next."""
    receiver = first_receiver(topology)
    if receiver is None:
        return None
    expected = refused_by(receiver, topology, "OrderError")
    if not topology.pipelined:  # rank0 generates too, and refuses what it was made to send
        expected = refused_by(0, topology, "OrderError", others=PEER_LOST | {"OrderError"})
    return broken_at(topology, expected, rank=0, point=FaultPoint.SENDING, action=action)


def _reordered(topology: Topology, pace: Pace) -> Scenario | None:
    if topology.max_in_flight < 2:
        return None
    sending = FaultPoint.SENDING
    return Scenario(
        topology=topology,
        faults=(
            at(rank=0, chunk=FAULT_CHUNK, point=sending, action="withhold"),
            at(rank=0, chunk=FAULT_CHUNK + 1, point=sending, action="send_after"),
        ),
        expected=refused_by(topology.leader, topology, "OrderError"),
    )


CASES = (
    Case(
        number=2,
        name="call-count/extra",
        description="one rank counts a generator call more than planned",
        default_topology=PP1_TP2,
        build=partial(_count, 2),
    ),
    Case(
        number=2,
        name="call-count/short",
        description="one rank counts a generator call less than planned",
        default_topology=PP1,
        build=partial(_count, 0),
    ),
    Case(
        number=2,
        name="call-count/steps",
        description="one rank runs a step more than planned, between two comparisons",
        default_topology=TP2,
        build=_longer_schedule,
    ),
    Case(
        number=5,
        name="start-frame/planned",
        description="the planner's current_start_frame is off by one, for one chunk",
        default_topology=PP0,
        build=_start_frame_planned,
    ),
    Case(
        number=5,
        name="start-frame/sent",
        description="current_start_frame is off by one as the mesh receives it",
        default_topology=PP1,
        build=_start_frame_sent,
    ),
    Case(
        number=5,
        name="start-frame/one-rank",
        description="current_start_frame is off by one on one generator rank",
        default_topology=TP2,
        build=_start_frame_on_one_rank,
    ),
    Case(
        number=11,
        name="bias-on-one-rank",
        description="kv_cache_attention_bias differs on one rank",
        default_topology=TP2,
        build=_bias_on_one_rank,
    ),
    Case(
        number=11,
        name="bias-on-the-mesh",
        description="kv_cache_attention_bias is not what rank0 planned",
        default_topology=PP0,
        build=_bias_on_one_rank,
    ),
    Case(
        number=12,
        name="steps-on-one-rank",
        description="denoising_step_list is longer on one rank, and planned so there",
        default_topology=TP2,
        build=_steps_on_one_rank,
    ),
    Case(
        number=15,
        name="unknown-version",
        description="an envelope of version 99 arrives",
        default_topology=PP1,
        build=_version,
    ),
    Case(
        number=16,
        name="order/duplicated",
        description="an envelope is sent twice",
        default_topology=PP1,
        build=partial(_resent, "send_twice"),
    ),
    Case(
        number=16,
        name="order/reordered",
        description="two envelopes change places",
        default_topology=PP1,
        build=_reordered,
    ),
    Case(
        number=16,
        name="order/replayed",
        description="an old envelope is sent again",
        default_topology=PP0,
        build=partial(_resent, "send_again"),
    ),
)
