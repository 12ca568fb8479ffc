"""A loss is told by its first cause, and kept with the chunk by which pictures came again."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

_MOST_KEPT = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """A loss that is over."""

    why: str
    lost_at: float
    """As `time.time` counts."""
    after_s: float
    """From the loss to the first chunk after it."""
    chunk_index: int
    """That chunk's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loss:
    why: str
    is_of_rank: bool
    is_asked_for: bool
    lost_at: float
    lost_at_s: float


class Recoveries:
    """Of one session; its caller holds the session's lock."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock, self._wall_clock = clock, wall_clock
        self._loss: _Loss | None = None
        self._over: deque[Recovery] = deque(maxlen=_MOST_KEPT)

    @property
    def all(self) -> tuple[Recovery, ...]:
        """Those that are over, newest last."""
        return tuple(self._over)

    def lost(self, why: str, *, is_of_rank: bool = False, is_asked_for: bool = False) -> str:
        """What to say of the loss. The first rank that ended is its cause: the others are ended
        because of it, and connections break because of both. A rewind, which is asked for, is none.
        """
        known = self._loss
        if known is not None and (known.is_of_rank or known.is_asked_for):
            return known.why
        self._loss = _Loss(
            why=why,
            is_of_rank=is_of_rank,
            is_asked_for=is_asked_for,
            lost_at=self._wall_clock() if known is None else known.lost_at,
            lost_at_s=self._clock() if known is None else known.lost_at_s,
        )
        return why

    def ready(self) -> None:
        """The ranks are there again: what is lost from here on has a cause of its own."""
        if self._loss is not None:
            is_asked_for = self._loss.is_asked_for
            self._loss = None if is_asked_for else replace(self._loss, is_of_rank=False)

    def came(self, chunk_index: int) -> bool:
        """A chunk came: whether it is the first after a loss."""
        loss, self._loss = self._loss, None
        if loss is None:
            return False
        self._over.append(
            Recovery(
                why=loss.why,
                lost_at=loss.lost_at,
                after_s=self._clock() - loss.lost_at_s,
                chunk_index=chunk_index,
            )
        )
        return True
