"""A scenario is a value: one fault, on one topology, and how it must end."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from scope_contracts.envelope import PlanId
from scope_contracts.integrity import IntegrityLevel
from scope_rt.faults import FaultPoint
from scope_rt.topology import Topology
from scope_runners.break_it.detectors import Detector
from scope_runners.break_it.faults import Fault, at
from scope_runners.break_it.job import RunOptions, Script
from scope_runners.break_it.observation import LEFT, Observation

A_STREAM = Script()
WITH_START_FRAME = Script(has_start_frame=True)
NOTHING_SET: Mapping[str, str] = {}
FAULT_CHUNK = 3
"""The chunk at which faults happen: the cache is in use, and not yet full."""
MISMATCH_S = 2.0
"""Bound of a mismatch: it is detected before the next collective."""
START_S = 10.0
"""The same where ranks must connect and load first."""
DEAD_S = 2.0
"""Within this a process that died is reported."""
RESUME_S = 15.0
"""From the detection of a lost rank to the next chunk of the restarted group, at most."""

PEER_LOST = frozenset({"PeerLostError", "LinkTimeoutError"})
"""The errors of ranks whose peer is gone."""
IN_ORDER = frozenset({LEFT})
"""The end of ranks that notice nothing."""


class Role(StrEnum):
    """What a rank is in its topology."""

    RANK0 = "rank0"
    LEADER = "leader"
    FOLLOWER = "follower"

    def rank_in(self, topology: Topology) -> int | None:
        """The rank of this role; None where no rank has it, or where rank0 has it too."""
        match self:
            case Role.RANK0:
                return 0
            case Role.LEADER:
                return topology.leader or None
            case Role.FOLLOWER:
                *_, last = topology.generator_ranks
                return None if last == topology.leader else last


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast this machine is: seconds a chunk, each of `num_calls` generator calls."""

    heartbeat_s: float
    """Within this a stopped or cut-off rank is named."""
    chunk_s: float
    num_calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """How a fault must end.

    `headline` says it in a few words; `ends` has, by rank, how it may end: an error class, or
    one of the ends of `observation`.
    """

    headline: str
    ends: tuple[frozenset[str], ...]
    within_s: float = MISMATCH_S
    """From the fault to the last of these errors."""
    names: Mapping[int, str] = field(default_factory=dict)
    """What a rank's message must say of the lost rank, by rank: a regular expression."""
    resumes: bool = False
    most_wrong: int = 0
    """Chunks that may be emitted wrong before it is found: what is verified in rotation."""

    @property
    def is_unharmed(self) -> bool:
        """Whether the fault must have no effect: no rank ends with an error."""
        return all(end == IN_ORDER for end in self.ends)

    @property
    def completes(self) -> bool:
        """Whether the stream must emit all its chunks."""
        return self.resumes or self.is_unharmed


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario(RunOptions):
    """A run in which something breaks."""

    topology: Topology
    expected: Expected
    faults: tuple[Fault, ...] = ()
    shared: Mapping[str, str] = field(default_factory=lambda: NOTHING_SET)
    """Environment of all ranks."""
    environ: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    """Environment of single ranks."""
    cuts_connection: bool = False
    """Whether the ranks are on two hosts, and the connection between them is cut."""
    check: Callable[[Observation], list[str]] = lambda seen: []
    """What else must hold; returns complaints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A named way to break a stream.

    `build` returns None for a topology on which it is not possible; `default_topology` is the one
    that is used where none is asked for.
    """

    number: int
    name: str
    description: str
    default_topology: Topology
    build: Callable[[Topology, Pace], Scenario | None]
    level: IntegrityLevel | None = None
    """Of a numeric fault, which is tried at each."""
    layer: tuple[Detector, ...] = ()
    """What finds a numeric fault; all of them must be disarmed to let it through."""

    @property
    def fault(self) -> str:
        """The name without the level."""
        return self.name if self.level is None else self.name.removesuffix(f"/{self.level}")


SINGLE = Topology(plan_id=PlanId.SINGLE, tp_degree=1)
TP2 = Topology(plan_id=PlanId.TP_V1_1, tp_degree=2)
PP0 = Topology(plan_id=PlanId.PP0, tp_degree=1)
PP1 = Topology(plan_id=PlanId.PP1, tp_degree=1)
PP1_TP2 = Topology(plan_id=PlanId.PP1, tp_degree=2)


def broken_at(
    topology: Topology,
    expected: Expected,
    *,
    rank: int,
    point: FaultPoint,
    action: str,
    script: Script = A_STREAM,
    shared: Mapping[str, str] = NOTHING_SET,
    **arguments: Any,
) -> Scenario:
    """A stream in which one fault happens once."""
    fault = at(rank=rank, chunk=FAULT_CHUNK, point=point, action=action, **arguments)
    return Scenario(
        topology=topology, expected=expected, faults=(fault,), script=script, shared=shared
    )


def refused_by(
    rank: int, topology: Topology, *errors: str, others: frozenset[str] = PEER_LOST
) -> Expected:
    """One rank ends with one of `errors`, and the `others` lose it."""
    ends = [others] * topology.world_size
    ends[rank] = frozenset(errors)
    return Expected(headline=f"{errors[0]} {rank}", ends=tuple(ends))


def refused_by_generators(topology: Topology, *errors: str) -> Expected:
    """All generator ranks end with one of `errors`; a rank0 that is none of them loses them."""
    ends = [PEER_LOST] * topology.world_size
    for rank in topology.generator_ranks:
        ends[rank] = frozenset(errors)
    ranks = " ".join(map(str, topology.generator_ranks))
    return Expected(headline=f"{errors[0]} {ranks}", ends=tuple(ends))


def refused_by_all(topology: Topology, *errors: str) -> Expected:
    """All ranks end with one of `errors`, before the first chunk."""
    ends = (frozenset(errors),) * topology.world_size
    ranks = " ".join(map(str, range(topology.world_size)))
    return Expected(headline=f"{errors[0]} {ranks}", ends=ends, within_s=START_S)


def lost(rank: int, topology: Topology, end: str, *, within_s: float) -> Expected:
    """One rank is lost, all others name it, and the stream resumes."""
    ends = [PEER_LOST] * topology.world_size
    ends[rank] = frozenset({end})
    others = set(range(topology.world_size)) - {rank}
    return Expected(
        headline=f"{end} {rank}, named by the others" if others else end,
        ends=tuple(ends),
        within_s=within_s,
        # Not the place where it was noticed, as in "receive from rank 1: rank 2 closed ..."
        names=dict.fromkeys(others, rf"\brank {rank} (closed the connection|sent no heartbeat)"),
        resumes=True,
    )


def unaffected(topology: Topology, *, headline: str) -> Expected:
    """The stream emits all its chunks."""
    return Expected(headline=headline, ends=(IN_ORDER,) * topology.world_size)


def last_generator(topology: Topology) -> int:
    """The rank to break where any generator rank would do: a follower, if there is one."""
    return topology.generator_ranks[-1]


def first_receiver(topology: Topology) -> int | None:
    """The rank that rank0 sends envelopes to."""
    return 1 if topology.world_size > 1 else None
