"""A fault happens at a named point of one rank and chunk, and nowhere else.

Faults travel to the ranks as JSON in `SCOPE_FAULTS`. Each one is written to the log that the plan
names before it happens.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from scope_contracts.errors import UserInputError
from scope_rt.faults import FaultPoint
from scope_runners.break_it.actions import ACTIONS, RECALLING_ACTIONS
from scope_runners.break_it.line_log import append_line

Value = TypeVar("Value")
DIES_LATER = "kill_in_message"
"""The action after which a rank has a moment left, to send what comes before its death."""
_DEATH_S = 60.0
"""Longer than that moment, on any machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault: `action` (a name of `actions`) with `arguments`, at one point.

    It happens in the given `attempt` of the group only (0: before any restart), at the first
    `times` times that `rank` reaches `point` in a chunk from `chunk` on.
    """

    action: str
    rank: int
    point: FaultPoint
    chunk: int = 0
    attempt: int = 0
    times: int = 1
    arguments: dict[str, Any] = field(default_factory=dict)


def at(
    *, rank: int, chunk: int, point: FaultPoint, action: str, times: int = 1, **arguments: Any
) -> Fault:
    """A fault in the words of the break-it suite."""
    return Fault(
        action=action, rank=rank, point=point, chunk=chunk, times=times, arguments=arguments
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFault:
    """A line of the log: this fault was about to happen, at `at_s` of the monotonic clock."""

    action: str
    point: FaultPoint
    rank: int
    attempt: int
    chunk: int
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """The faults of a run, and the file to which every one adds a line when it happens."""

    faults: tuple[Fault, ...]
    log: str | None = None


def encode(plan: FaultPlan) -> str:
    """The value of `SCOPE_FAULTS` that carries `plan`."""
    return json.dumps(asdict(plan))


def decode(text: str) -> FaultPlan:
    """The plan of `SCOPE_FAULTS`.

    Raises:
        UserInputError: it is not what `encode` writes.
    """
    try:
        plain = json.loads(text)
        faults = tuple(
            Fault(**(fault | {"point": FaultPoint(fault["point"])})) for fault in plain["faults"]
        )
        unknown = {fault.action for fault in faults} - ACTIONS.keys() - RECALLING_ACTIONS.keys()
        if unknown:
            raise ValueError(f"no action is called {min(unknown)}")
        return FaultPlan(faults=faults, log=plain["log"])
    except (ValueError, TypeError, KeyError) as error:
        raise UserInputError(f"SCOPE_FAULTS cannot be read: {error!r}; unset it") from error


def read_log(lines: Sequence[str]) -> tuple[InjectedFault, ...]:
    """What happened, from the lines of a plan's log."""
    return tuple(
        InjectedFault(**(plain | {"point": FaultPoint(plain["point"])}))
        for plain in map(json.loads, lines)
    )


class InjectedFaults:
    """The faults of one rank and attempt."""

    def __init__(self, plan: FaultPlan, *, rank: int, attempt: int) -> None:
        self._plan, self._rank, self._attempt, self._log = plan, rank, attempt, plan.log
        self._faults = [f for f in plan.faults if f.rank == rank and f.attempt == attempt]
        self._times_left = [fault.times for fault in self._faults]
        self._recalled: dict[FaultPoint, Any] = {
            fault.point: None for fault in self._faults if fault.action in RECALLING_ACTIONS
        }
        """What passed last at the points whose faults ask for it."""
        self._is_dying = False

    def __str__(self) -> str:
        """Those of all ranks, for a person."""
        return ", ".join(
            f"{fault.action} at {fault.point} of rank {fault.rank} from chunk {fault.chunk}"
            for fault in self._plan.faults
        )

    def reach(self, point: FaultPoint, chunk: int, value: Value) -> Value:
        if self._is_dying:
            time.sleep(_DEATH_S)  # or a next message would follow the one that was cut off
        passing: Any = value
        for index, fault in enumerate(self._faults):
            if fault.point is point and chunk >= fault.chunk and self._times_left[index] > 0:
                self._times_left[index] -= 1
                self._tell(fault, chunk)
                self._is_dying |= fault.action == DIES_LATER
                if fault.action in RECALLING_ACTIONS:
                    recalling = RECALLING_ACTIONS[fault.action]
                    passing = recalling(passing, self._recalled[point], **fault.arguments)
                else:
                    passing = ACTIONS[fault.action](passing, **fault.arguments)
        if point in self._recalled:
            self._recalled[point] = value
        return passing  # type: ignore[no-any-return]

    def _tell(self, fault: Fault, chunk: int) -> None:
        """Write it down before it happens: a killed rank says nothing any more."""
        if self._log is None:
            return
        happened = InjectedFault(
            action=fault.action,
            point=fault.point,
            rank=self._rank,
            attempt=self._attempt,
            chunk=chunk,
            at_s=time.monotonic(),
        )
        append_line(self._log, asdict(happened))
