"""A numeric fault is a value, tried at both levels of integrity: strict never shows a wrong chunk.

The default may show some where a check takes its turn: fewer than `WITHIN`, which is small here so
that a short stream shows it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any

from scope_contracts.integrity import IntegrityLevel
from scope_rt.faults import FaultPoint
from scope_rt.topology import Topology
from scope_runners.break_it.detectors import Detector
from scope_runners.break_it.faults import at
from scope_runners.break_it.job import Script
from scope_runners.break_it.scenario import (
    A_STREAM,
    FAULT_CHUNK,
    IN_ORDER,
    PEER_LOST,
    TP2,
    Case,
    Expected,
    Pace,
    Scenario,
    last_generator,
    refused_by,
    refused_by_generators,
)

WITHIN = 4
"""Chunks within which everything is verified once: `SCOPE_VERIFY_WITHIN` of these runs."""
LEVELS = (IntegrityLevel.DEFAULT, IntegrityLevel.STRICT)
ARITHMETIC = (Detector.ORACLE, Detector.LINEAR_SUMS, Detector.EDGES)
"""What computes again, and so finds most of what others find, where it has its turn."""
Refusal = Callable[[Topology, IntegrityLevel], Expected]


def refused_there(error: str, topology: Topology, level: IntegrityLevel) -> Expected:
    """By the rank where it happened, and the others know why it leaves."""
    rank = last_generator(topology)
    return refused_by(rank, topology, error, others=frozenset({"IntegrityError"}))


def refused_by_group(error: str, topology: Topology, level: IntegrityLevel) -> Expected:
    """By all generator ranks, which have compared something; a rank0 that is none is told."""
    expected = refused_by_generators(topology, error)
    told = [end if error in end else frozenset({"IntegrityError"}) for end in expected.ends]
    return replace(expected, ends=tuple(told))


def refused_by_each(topology: Topology, level: IntegrityLevel) -> Expected:
    """By every generator rank for itself, or it has just lost one that did."""
    return refused_by(
        topology.leader, topology, "IntegrityError", others=PEER_LOST | {"IntegrityError"}
    )


def refused_there_in_strict(topology: Topology, level: IntegrityLevel) -> Expected:
    """By the rank where it happened; by default when results are compared, if no turn came."""
    refusal = refused_there if level is IntegrityLevel.STRICT else refused_by_group
    return refusal("IntegrityError", topology, level)


def refused_by_rank0(error: str, topology: Topology, level: IntegrityLevel) -> Expected:
    """By rank0, before it shows the chunk; the others are told to leave."""
    return refused_by(0, topology, error, others=IN_ORDER)


def one_rank(topology: Topology) -> tuple[int, ...]:
    """The last generator rank: a follower, if there is one."""
    return (last_generator(topology),)


def one_of_several(topology: Topology) -> tuple[int, ...]:
    """The same, where other ranks compute the same chunk."""
    return one_rank(topology) if topology.tp_degree > 1 else ()


def all_generators(topology: Topology) -> tuple[int, ...]:
    return tuple(topology.generator_ranks)


def leader(topology: Topology) -> tuple[int, ...]:
    return (topology.leader,)


def rank0(topology: Topology) -> tuple[int, ...]:
    return (0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericFault:
    """`action` with `arguments` at `point` of the ranks `on`, and who must refuse it."""

    number: int
    name: str
    description: str
    layer: tuple[Detector, ...]
    """What finds it; empty for what no detector can be disarmed of."""
    refusal: Refusal
    action: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    point: FaultPoint = FaultPoint.GENERATOR
    on: Callable[[Topology], tuple[int, ...]] = one_rank
    chunk: int = FAULT_CHUNK
    levels: tuple[IntegrityLevel, ...] = LEVELS
    """Those that find it."""
    takes_turns: bool = False
    """Whether the default verifies it in rotation."""
    topology: Topology = TP2
    script: Script = A_STREAM

    def at(self, level: IntegrityLevel) -> Case:
        """As it is tried at one level."""
        return Case(
            number=self.number,
            name=f"{self.name}/{level}",
            description=self.description,
            default_topology=self.topology,
            build=partial(self._build, level),
            level=level,
            layer=self.layer,
        )

    def _build(self, level: IntegrityLevel, topology: Topology, pace: Pace) -> Scenario | None:
        ranks = self.on(topology)
        if not ranks:
            return None
        may_be_shown = self.takes_turns and level is IntegrityLevel.DEFAULT
        expected = replace(
            self.refusal(topology, level),
            within_s=inf,  # counted in chunks instead
            most_wrong=WITHIN - 1 if may_be_shown else 0,
        )
        faults = [
            at(
                rank=rank,
                chunk=self.chunk,
                point=self.point,
                action=self.action,
                **self.arguments,
            )
            for rank in ranks
        ]
        integrity = {"SCOPE_INTEGRITY": str(level), "SCOPE_VERIFY_WITHIN": str(WITHIN)}
        return Scenario(
            topology=topology,
            expected=expected,
            faults=tuple(faults),
            shared=integrity,
            script=self.script,
        )


def cases_of(*faults: NumericFault) -> tuple[Case, ...]:
    """Each of `faults`, at every level that finds it."""
    return tuple(fault.at(level) for fault in faults for level in fault.levels)
