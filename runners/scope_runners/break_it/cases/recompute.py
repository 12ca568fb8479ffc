"""Faults 3 and 7: a recompute whose context frames are missing, too short or lost on the way."""

from functools import partial

from scope_contracts.envelope import CONTEXT_FRAMES_OVERRIDE
from scope_rt.faults import FaultPoint
from scope_rt.topology import Topology
from scope_runners.break_it.job import Script, ScriptEvent
from scope_runners.break_it.scenario import (
    FAULT_CHUNK,
    IN_ORDER,
    PP0,
    PP1,
    PP1_TP2,
    Case,
    Pace,
    Scenario,
    broken_at,
    first_receiver,
    refused_by,
)

RECOMPUTED_ONCE = Script(events=(ScriptEvent(chunk=FAULT_CHUNK, recompute=True),))
"""A stream whose cache is rebuilt where the fault happens."""
RECOMPUTED_ALWAYS = Script(recomputes_always=True)
"""A stream whose cache is rebuilt at every chunk (R0a)."""


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


CASES = (
    Case(
        number=3,
        name="override/planned",
        description="a recompute is planned without its context frames",
        default_topology=PP1,
        build=partial(_without_context, RECOMPUTED_ONCE, "drop_tensor"),
    ),
    Case(
        number=3,
        name="override/sent",
        description="the context frames are lost between preflight and mesh",
        default_topology=PP1_TP2,
        build=partial(_context_lost_on_the_way, RECOMPUTED_ONCE),
    ),
    Case(
        number=7,
        name="r0a/omitted",
        description="a recompute model, R0a: rank0 has no context frames",
        default_topology=PP0,
        build=partial(_without_context, RECOMPUTED_ALWAYS, "drop_tensor"),
    ),
    Case(
        number=7,
        name="r0a/shortened",
        description="a recompute model, R0a: the context is a latent frame short",
        default_topology=PP0,
        build=partial(_without_context, RECOMPUTED_ALWAYS, "trim_tensor"),
    ),
    Case(
        number=7,
        name="r0a/lost",
        description="a recompute model, R0a: the context is lost on the way to the mesh",
        default_topology=PP0,
        build=partial(_context_lost_on_the_way, RECOMPUTED_ALWAYS),
    ),
)
