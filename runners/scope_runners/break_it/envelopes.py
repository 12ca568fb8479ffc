"""Faults 2, 3, 5, 7, 11, 12, 15 and 16: envelopes that are wrong, or right on one side only."""

from dataclasses import replace
from functools import partial

from scope_contracts.envelope import CONTEXT_FRAMES_OVERRIDE
from scope_rt.faults import FaultPoint
from scope_rt.mesh.topology import Topology
from scope_runners.break_it.faults import at
from scope_runners.break_it.observation import LEFT
from scope_runners.break_it.scenario import (
    FAULT_CHUNK,
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
from scope_runners.break_it.script import Cue, Script

REBUILT = Script(cues=(Cue(chunk=FAULT_CHUNK, recompute=True),))
"""A stream whose cache is rebuilt where the fault happens."""
REBUILDING = Script(rebuilds=True)
"""A stream whose cache is rebuilt at every chunk (R0a)."""
RARELY_COMPARED = {"SCOPE_DIGEST_EVERY": "64"}
"""No comparison is due where the fault happens."""
IN_ORDER = frozenset({LEFT})


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


def _without_context(script: Script, action: str, topology: Topology, pace: Pace) -> Scenario:
    """Rank0 plans a recompute and has no context for it, or another one than it should."""
    return broken_at(
        topology,
        refused_by(0, topology, "PreflightError", others=IN_ORDER),
        rank=0,
        point=FaultPoint.PLANNED,
        action=action,
        script=script,
        name=CONTEXT_FRAMES_OVERRIDE,
    )


def _context_lost_on_the_way(script: Script, topology: Topology, pace: Pace) -> Scenario | None:
    receiver = first_receiver(topology)
    if receiver is None:
        return None
    return broken_at(
        topology,
        refused_by(receiver, topology, "PreflightError"),
        rank=0,
        point=FaultPoint.SENDING,
        action="drop_sent_tensor",
        script=script,
        name=CONTEXT_FRAMES_OVERRIDE,
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
        _parted(topology, "ParityError"),
        rank=last_generator(topology),
        point=FaultPoint.ENTERED,
        action="edit",
        kv_cache_attention_bias=0.5,
    )


def _steps_on_one_rank(topology: Topology, pace: Pace) -> Scenario:
    return broken_at(
        topology,
        _parted(topology, "ParityError", "CallCountError"),
        rank=last_generator(topology),
        point=FaultPoint.ENTERED,
        action="lengthen_steps",
        is_planned=True,
    )


def _parted(topology: Topology, *errors: str) -> Expected:
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
        others = (PEER_LOST | {"OrderError"},) * (topology.world_size - 1)
        ends = (frozenset({"OrderError"}), *others)
        expected = replace(expected, headline="OrderError 0", ends=ends)
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
        what="one rank counts a generator call more than planned",
        natural=PP1_TP2,
        build=partial(_count, 2),
    ),
    Case(
        number=2,
        name="call-count/short",
        what="one rank counts a generator call less than planned",
        natural=PP1,
        build=partial(_count, 0),
    ),
    Case(
        number=2,
        name="call-count/steps",
        what="one rank runs a step more than planned, between two comparisons",
        natural=TP2,
        build=_longer_schedule,
    ),
    Case(
        number=3,
        name="override/planned",
        what="a recompute is planned without its context frames",
        natural=PP1,
        build=partial(_without_context, REBUILT, "drop_tensor"),
    ),
    Case(
        number=3,
        name="override/sent",
        what="the context frames are lost between preflight and mesh",
        natural=PP1_TP2,
        build=partial(_context_lost_on_the_way, REBUILT),
    ),
    Case(
        number=5,
        name="start-frame/planned",
        what="the planner's current_start_frame is off by one, for one chunk",
        natural=PP0,
        build=_start_frame_planned,
    ),
    Case(
        number=5,
        name="start-frame/sent",
        what="current_start_frame is off by one as the mesh receives it",
        natural=PP1,
        build=_start_frame_sent,
    ),
    Case(
        number=5,
        name="start-frame/one-rank",
        what="current_start_frame is off by one on one generator rank",
        natural=TP2,
        build=_start_frame_on_one_rank,
    ),
    Case(
        number=7,
        name="r0a/omitted",
        what="a recompute model, R0a: rank0 has no context frames",
        natural=PP0,
        build=partial(_without_context, REBUILDING, "drop_tensor"),
    ),
    Case(
        number=7,
        name="r0a/shortened",
        what="a recompute model, R0a: the context is a latent frame short",
        natural=PP0,
        build=partial(_without_context, REBUILDING, "trim_tensor"),
    ),
    Case(
        number=7,
        name="r0a/lost",
        what="a recompute model, R0a: the context is lost on the way to the mesh",
        natural=PP0,
        build=partial(_context_lost_on_the_way, REBUILDING),
    ),
    Case(
        number=11,
        name="bias-on-one-rank",
        what="kv_cache_attention_bias differs on one rank",
        natural=TP2,
        build=_bias_on_one_rank,
    ),
    Case(
        number=11,
        name="bias-on-the-mesh",
        what="kv_cache_attention_bias is not what rank0 planned",
        natural=PP0,
        build=_bias_on_one_rank,
    ),
    Case(
        number=12,
        name="steps-on-one-rank",
        what="denoising_step_list is longer on one rank, and planned so there",
        natural=TP2,
        build=_steps_on_one_rank,
    ),
    Case(
        number=15,
        name="unknown-version",
        what="an envelope of version 99 arrives",
        natural=PP1,
        build=_version,
    ),
    Case(
        number=16,
        name="order/duplicated",
        what="an envelope is sent twice",
        natural=PP1,
        build=partial(_resent, "send_twice"),
    ),
    Case(
        number=16,
        name="order/reordered",
        what="two envelopes change places",
        natural=PP1,
        build=_reordered,
    ),
    Case(
        number=16,
        name="order/replayed",
        what="an old envelope is sent again",
        natural=PP0,
        build=partial(_resent, "send_again"),
    ),
)
