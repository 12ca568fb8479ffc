"""What a chunk takes is what was asked for: nothing is lost, late, altered or made up.

The inbox coalesces. Here everything is noted a second time as it comes, and put together by other
code when a chunk has taken it.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from scope_contracts.integrity import suspect_from
from scope_rt.control.inbox import ControlInbox, Directive, Receipt, ScheduledDirective, Taken
from scope_rt.faults import FaultPoint
from scope_rt.instruments import Instruments


class VerifiedInbox(ControlInbox):
    """`take` raises what `Checks.planned` does, too; who waits for a receipt is told when the inbox
    is closed."""

    def __init__(self, instruments: Instruments) -> None:
        super().__init__()
        self._instruments = instruments
        self._noting = threading.Lock()
        """Held while something is posted or taken, so that both books have the same."""
        self._noted = Directive()
        self._to_come: dict[int, Directive] = {}
        """By chunk, in order."""

    def post(self, directive: Directive) -> Receipt:
        with self._noting:
            receipt = super().post(directive)
            self._noted = _together((self._noted, directive))
            return receipt

    def schedule(self, events: Iterable[ScheduledDirective]) -> None:
        with self._noting:
            asked = tuple(events)
            by_chunk: dict[int, list[Directive]] = {}
            for each in sorted(asked, key=lambda event: event.chunk_index):
                by_chunk.setdefault(each.chunk_index, []).append(each.directive)
            self._to_come = {index: _together(each) for index, each in by_chunk.items()}
            super().schedule(asked)

    def take(self, chunk_index: int, *, unless: Callable[[Directive], bool]) -> Taken | None:
        with self._noting:
            taken = super().take(chunk_index, unless=unless)
            if taken is not None:
                taken = self._instruments.faults.reach(FaultPoint.TAKEN, chunk_index, taken)
                self._verify(chunk_index, taken.directive)
            return taken

    def close(self, reason: str = "the stream has ended") -> None:
        with self._noting:
            super().close(reason)
            self._noted = Directive()

    def _verify(self, chunk_index: int, taken: Directive) -> None:
        due: list[Directive] = []
        while self._to_come and (first := next(iter(self._to_come))) <= chunk_index:
            due.append(self._to_come.pop(first))
        asked = _together([*due, self._noted])
        self._noted = Directive()
        with suspect_from(chunk_index):
            for what, got, want in _compared(taken, asked):
                self._instruments.checks.planned(chunk_index, what, got=got, asked=want)


def _together(asked: Sequence[Directive]) -> Directive:
    """All of it, of prompts, biases and seeds the last one, a prompt with its transition."""
    newest = next((each for each in reversed(asked) if each.conditioning is not None), Directive())
    return Directive(
        conditioning=newest.conditioning,
        transition=newest.transition and replace(newest.transition),  # not the one in the inbox
        hard_cut=any(each.hard_cut for each in asked),
        drop_in_flight=any(each.drop_in_flight for each in asked),
        recompute=any(each.recompute for each in asked),
        bias=next((each.bias for each in reversed(asked) if each.bias is not None), None),
        seed=next((each.seed for each in reversed(asked) if each.seed is not None), None),
        command_ids=tuple(name for each in asked for name in each.command_ids),
    )


def _compared(taken: Directive, asked: Directive) -> Iterator[tuple[str, object, object]]:
    """By name: what was taken, and what was asked for."""
    got, want = taken.conditioning, asked.conditioning
    yield "prompt", got and got.prompt, want and want.prompt
    if got is not None and want is not None:
        yield "embeddings", got.embeds_sha256, want.embeds_sha256
        yield "transition", taken.transition, asked.transition
    yield "hard_cut", taken.hard_cut, asked.hard_cut
    yield "drop_in_flight", taken.drop_in_flight, asked.drop_in_flight
    yield "recompute", taken.recompute, asked.recompute
    yield "bias", taken.bias, asked.bias
    yield "seed", taken.seed, asked.seed
    yield "commands", taken.command_ids, asked.command_ids
