"""Control input is coalesced, latest wins, and takes effect at a chunk boundary."""

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Conditioning:
    """A prompt and its embeddings `[B, text_len, text_dim]`."""

    prompt: str
    embeds: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive:
    """What a person asked for between two chunks."""

    conditioning: Conditioning | None = None
    hard_cut: bool = False
    drop_in_flight: bool = False
    """Whether chunks of the old epoch that are under way are dropped, or shown first."""

    def then(self, later: "Directive") -> "Directive":
        """Both as one; of two prompts the later wins, a cut is never lost."""
        return Directive(
            conditioning=later.conditioning or self.conditioning,
            hard_cut=self.hard_cut or later.hard_cut,
            drop_in_flight=self.drop_in_flight or later.drop_in_flight,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledDirective:
    """A directive for one chunk index, so that every plan makes the same video of it."""

    chunk_index: int
    directive: Directive


class ControlInbox:
    """Where any thread leaves directives, and the controller takes them once a chunk."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending = Directive()
        self._schedule: dict[int, Directive] = {}

    def post(self, directive: Directive) -> None:
        """Ask for something at the next chunk that is planned."""
        with self._lock:
            self._pending = self._pending.then(directive)

    def schedule(self, events: Iterable[ScheduledDirective]) -> None:
        """Ask for something at chunks that are still to come, instead of what was asked before."""
        with self._lock:
            self._schedule.clear()
            for event in events:
                planned = self._schedule.get(event.chunk_index, Directive())
                self._schedule[event.chunk_index] = planned.then(event.directive)

    def take(self, chunk_index: int) -> Directive:
        """Everything asked for up to the planning of `chunk_index`."""
        with self._lock:
            taken = Directive()
            for index in [index for index in sorted(self._schedule) if index <= chunk_index]:
                taken = taken.then(self._schedule.pop(index))
            taken, self._pending = taken.then(self._pending), Directive()
            return taken
