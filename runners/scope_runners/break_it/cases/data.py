"""Faults 4, 13 and 14: caches, weights and tensors that are not what all believe they are."""

from functools import partial

from scope_contracts.envelope import PlanId
from scope_rt.faults import FaultPoint
from scope_rt.topology import Topology
from scope_runners.break_it.faults import at
from scope_runners.break_it.job import Script, ScriptEvent
from scope_runners.break_it.scenario import (
    FAULT_CHUNK,
    IN_ORDER,
    PP0,
    PP1_TP2,
    TP2,
    Case,
    Pace,
    Scenario,
    broken_at,
    first_receiver,
    last_generator,
    refused_by,
    refused_by_all,
    refused_by_generators,
)

PROMPT_REPEATED = Script(events=(ScriptEvent(chunk=FAULT_CHUNK, repeats_prompt=True),))
"""A stream whose text is sent once more where the fault happens."""


def _cache_reset(topology: Topology, pace: Pace) -> Scenario:
    """A bad endpoint empties the cache of one rank: rank0, where it generates."""
    rank, is_alone = topology.leader, topology.tp_degree == 1
    expected = refused_by_generators(topology, "CacheError" if is_alone else "ParityError")
    return broken_at(topology, expected, rank=rank, point=FaultPoint.GENERATOR, action="reset_ring")


def _epoch_unannounced(topology: Topology, pace: Pace) -> Scenario:
    return broken_at(
        topology,
        refused_by(0, topology, "EpochError", others=IN_ORDER),
        rank=0,
        point=FaultPoint.PLANNED,
        action="start_epoch_unannounced",
        script=PROMPT_REPEATED,
    )


def _altered_at_load(topology: Topology, pace: Pace) -> Scenario:
    rank = last_generator(topology)
    return Scenario(
        topology=topology,
        faults=(at(rank=rank, chunk=-1, point=FaultPoint.LOADED, action="alter_weight"),),
        expected=refused_by_all(topology, "FingerprintError"),
    )


def _altered_midstream(topology: Topology, pace: Pace) -> Scenario:
    rank = last_generator(topology)
    others = frozenset({"IntegrityError"})
    return broken_at(
        topology,
        refused_by(rank, topology, "FingerprintError", others=others),
        rank=rank,
        point=FaultPoint.GENERATOR,
        action="alter_weight",
        shared={"SCOPE_INTEGRITY": "strict"},  # by default it is found within M chunks
    )


def _flipped(is_answer: bool, topology: Topology, pace: Pace) -> Scenario | None:
    """A bit of `latents_in` or `latents_out` flips between two ranks."""
    sender, receiver = (topology.leader, 0) if is_answer else (0, first_receiver(topology))
    if receiver is None or topology.plan_id is PlanId.TP_V0:  # which sends no latents
        return None
    if is_answer and (not topology.pipelined or topology.tp_degree > 1):
        return None
    return broken_at(
        topology,
        refused_by(receiver, topology, "DigestError"),
        rank=sender,
        point=FaultPoint.FRAMES,
        action="flip_bit",
        frame=1,
    )


CASES = (
    Case(
        number=4,
        name="cache-reset/out-of-band",
        description="the cache of one rank is emptied, which no envelope says",
        default_topology=TP2,
        build=_cache_reset,
    ),
    Case(
        number=4,
        name="cache-reset/no-epoch",
        description="rank0 resets the cache of all ranks without a new epoch",
        default_topology=PP0,
        build=_epoch_unannounced,
    ),
    Case(
        number=13,
        name="weights/at-load",
        description="one bit of one rank's weight shard is wrong at load",
        default_topology=PP1_TP2,
        build=_altered_at_load,
    ),
    Case(
        number=13,
        name="weights/mid-stream",
        description="one bit of one rank's weight shard flips in memory",
        default_topology=TP2,
        build=_altered_midstream,
    ),
    Case(
        number=14,
        name="bit-flip/inputs",
        description="one bit of latents_in flips on the link",
        default_topology=PP1_TP2,
        build=partial(_flipped, False),
    ),
    Case(
        number=14,
        name="bit-flip/answer",
        description="one bit of latents_out flips on the link",
        default_topology=PP0,
        build=partial(_flipped, True),
    ),
)
