"""What happens in a soak follows from its seed: equal seeds break and steer a stream alike.

Places are counted in chunks of the stream, so that they do not depend on how fast it runs.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random

from scope_rt.control.transition import Interpolation, TransitionSpec
from scope_rt.faults import FaultPoint
from scope_rt.text.words import Background, Colour, Shape, Speed
from scope_rt.topology import Topology
from scope_runners.break_it.faults import Fault

CALM = (0.40, 0.55)
"""This part of a stream has no faults: only there do ranks live long enough to be seen growing."""
_EDGE_CHUNKS = 4
"""Nothing happens in the first and the last chunks."""
_RESTART_S = 4.0
"""About how long ranks take to start again."""


class FaultKind(StrEnum):
    """How a rank is broken."""

    KILL = "kill"
    """SIGKILL from outside, at any moment."""
    KILL_AGAIN = "kill again"
    """One more while the ranks may still be starting again."""
    STOP = "stop"
    """SIGSTOP from outside, for good."""
    PAUSE = "pause"
    """SIGSTOP, and SIGCONT before anyone must miss the rank."""
    KILL_INSIDE = "kill inside"
    """SIGKILL at a point of the protocol, such as with half a message sent."""
    RAISE = "exception"
    """An exception at a point of the protocol."""
    DELAY = "late result"
    """One chunk takes seconds longer."""
    SLOW = "slow rank"
    """Many generator calls take longer on one rank."""

    @property
    def is_fatal(self) -> bool:
        """Whether the group must be started again."""
        return self not in (FaultKind.PAUSE, FaultKind.DELAY, FaultKind.SLOW)


_WEIGHTS = {
    FaultKind.KILL: 4,
    FaultKind.KILL_AGAIN: 2,
    FaultKind.STOP: 2,
    FaultKind.PAUSE: 2,
    FaultKind.KILL_INSIDE: 4,
    FaultKind.RAISE: 3,
    FaultKind.DELAY: 2,
    FaultKind.SLOW: 1,
}
_RANK0_POINTS = (
    FaultPoint.PLANNED,
    FaultPoint.SENDING,
    FaultPoint.FRAMES,
    FaultPoint.COLLECTED,
    FaultPoint.EMIT,
)
_GENERATOR_POINTS = (
    FaultPoint.IDLE,  # which rank0 never is
    FaultPoint.ENTERED,
    FaultPoint.RECOMPUTE,
    FaultPoint.CALL,
    FaultPoint.RESULT,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """One fault, due when `chunk` chunks were shown.

    One from outside comes `delay_s` later, one from inside is `injected`. `lasts_s` is the length
    of a pause, or the time until the same rank is killed again, whatever has become of it.
    """

    number: int
    kind: FaultKind
    rank: int
    chunk: int
    delay_s: float = 0.0
    lasts_s: float = 0.0
    injected: Fault | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cue:
    """What a person asks for when `chunk` chunks were shown: a prompt, a live hard cut, or both."""

    number: int
    chunk: int
    prompt: str | None = None
    transition: TransitionSpec | None = None
    hard_cut: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """All of a soak, in order."""

    first_prompt: str
    cues: tuple[Cue, ...]
    faults: tuple[PlannedFault, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRates:
    """How often faults and cues come; means are in seconds of the stream."""

    chunk_s: float
    fault_every_s: float
    cue_every_s: float
    most_pause_s: float
    """How long a rank may be stopped without being missed."""


def schedule_of(seed: int, *, num_chunks: int, topology: Topology, rates: FaultRates) -> Schedule:
    """The schedule of a stream of `num_chunks` chunks."""
    steering, breaking = Random(f"cues {seed}"), Random(f"faults {seed}")
    first_prompt = drawn_prompt(steering)
    cues = drawn_cues(steering, num_chunks, every_chunks=rates.cue_every_s / rates.chunk_s)
    faults = _faults(breaking, num_chunks, topology, rates)
    return Schedule(
        first_prompt=first_prompt,
        cues=tuple(replace(cue, number=number) for number, cue in enumerate(cues)),
        faults=tuple(replace(fault, number=number) for number, fault in enumerate(faults)),
    )


def drawn_places(random: Random, num_chunks: int, *, every_chunks: float) -> Iterator[int]:
    """Random chunks, `every_chunks` apart on average and at least one."""
    place = float(_EDGE_CHUNKS)
    while True:
        place += max(1.0, random.expovariate(1 / every_chunks))
        if place >= num_chunks - _EDGE_CHUNKS:
            return
        yield math.floor(place)


def drawn_cues(random: Random, num_chunks: int, *, every_chunks: float) -> Iterator[Cue]:
    """What a person asks for at random chunks, `every_chunks` apart on average; not numbered."""
    for chunk in drawn_places(random, num_chunks, every_chunks=every_chunks):
        kind = random.choices(("prompt", "soft", "cut", "scene"), (3, 4, 2, 2))[0]
        transition = None
        if kind == "soft":
            transition = TransitionSpec(
                num_chunks=random.randint(2, 12),
                method=random.choice(list(Interpolation)),
                bias_floor=random.choice((0.3, 0.6, 1.0)),
            )
        yield Cue(
            number=0,
            chunk=chunk,
            prompt=None if kind == "cut" else drawn_prompt(random),
            transition=transition,
            hard_cut=kind in ("cut", "scene"),
        )


def drawn_prompt(random: Random) -> str:
    """One that the embedded model knows."""
    colours = random.sample(list(Colour), random.randint(1, 2))
    objects = [f"a {colour} {random.choice(list(Shape))}" for colour in colours]
    setting = f"{random.choice(list(Speed))}, on {random.choice(list(Background))}"
    return f"{' and '.join(objects)}, {setting}"


def _faults(
    random: Random, num_chunks: int, topology: Topology, rates: FaultRates
) -> Iterator[PlannedFault]:
    calm_from, calm_to = (round(part * num_chunks) for part in CALM)
    to_come = list[FaultKind]()
    every_chunks = rates.fault_every_s / rates.chunk_s
    for chunk in drawn_places(random, num_chunks, every_chunks=every_chunks):
        if calm_from <= chunk < calm_to:
            continue
        if not to_come:
            to_come = [kind for kind, weight in _WEIGHTS.items() for _ in range(weight)]
            random.shuffle(to_come)
        yield _fault(random, to_come.pop(), chunk, topology, rates)


def _fault(
    random: Random, kind: FaultKind, chunk: int, topology: Topology, rates: FaultRates
) -> PlannedFault:
    rank = random.randrange(topology.world_size)
    injected = None
    lasts_s = 0.0
    match kind:
        case FaultKind.PAUSE:
            lasts_s = random.uniform(0.2, rates.most_pause_s)
        case FaultKind.KILL_AGAIN:
            lasts_s = random.uniform(0.2, _RESTART_S)
        case FaultKind.KILL_INSIDE | FaultKind.RAISE:
            point = _point(random, rank, topology)
            action = "raise" if kind is FaultKind.RAISE else "kill"
            if action == "kill" and point is FaultPoint.FRAMES:
                action = "kill_in_message"
            injected = Fault(action=action, rank=rank, point=point, chunk=chunk)
        case FaultKind.DELAY:
            rank = topology.leader
            late = {"seconds": random.uniform(0.5, 3.0)}
            injected = _delay(rank, FaultPoint.RESULT, chunk, 1, late)
        case FaultKind.SLOW:
            rank = random.choice(topology.generator_ranks)
            slow = {"seconds": random.uniform(0.05, 0.3)}
            injected = _delay(rank, FaultPoint.CALL, chunk, random.randint(10, 60), slow)
    return PlannedFault(
        number=0,
        kind=kind,
        rank=rank,
        chunk=chunk,
        delay_s=random.uniform(0.0, rates.chunk_s),
        lasts_s=lasts_s,
        injected=injected,
    )


def _delay(
    rank: int, point: FaultPoint, chunk: int, times: int, arguments: dict[str, float]
) -> Fault:
    return Fault(
        action="delay", rank=rank, point=point, chunk=chunk, times=times, arguments=arguments
    )


def _point(random: Random, rank: int, topology: Topology) -> FaultPoint:
    """A point that `rank` passes with every chunk, or with the next recompute."""
    if rank not in topology.generator_ranks:
        return random.choice(_RANK0_POINTS)
    if rank > 0:
        return random.choice(_GENERATOR_POINTS)
    points = [*_RANK0_POINTS, *_GENERATOR_POINTS[1:]]
    if topology.world_size == 1:
        points.remove(FaultPoint.FRAMES)  # there is no link
    return random.choice(points)
