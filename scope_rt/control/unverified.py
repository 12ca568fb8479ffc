"""The newest chunks are unverified: a chunk counts as verified once M chunks were computed from it
on, itself the first, and none of them was found wrong.

All state is verified in rotation within M chunks, so an error that comes with chunk k says nothing
against chunks up to k - M. In `strict` M is 1: a chunk that was shown is verified.

Only what this process has sent is accused. What an earlier one computed was computed from memory
that is gone; every process verifies what it loads.
"""

from collections import deque

from scope_contracts.retraction import Retraction
from scope_rt.control.in_flight import InFlight


class Unverified:
    """Chunks that a later error would retract, and how to plan them again."""

    def __init__(self, within: int) -> None:
        """`within` is M, in chunks."""
        self._within = within
        self._sent: deque[InFlight] = deque()
        self._shown: deque[tuple[int, int]] = deque()
        """Index and epoch of each chunk that was decoded for the consumer."""

    @property
    def sent(self) -> tuple[InFlight, ...]:
        """Unverified chunks since the last `begin`, oldest first, those that are under way too."""
        return tuple(self._sent)

    @property
    def num_shown_again(self) -> int:
        """Chunks that the consumer was given and that are planned again with `sent`."""
        first = self._sent[0].envelope.chunk_index if self._sent else None
        return sum(first is not None and index >= first for index, _ in self._shown)

    @property
    def trusts_context(self) -> bool:
        """Whether every chunk that was shown is verified."""
        return self._within == 1

    def begin(self) -> None:
        """Another stream begins: chunks of the one before are not planned again."""
        self._sent.clear()

    def add_sent(self, sent: InFlight) -> None:
        """A chunk is about to be sent."""
        self._sent.append(sent)

    def add_shown(self, chunk_index: int, cache_epoch: int) -> None:
        """A chunk was decoded, and nothing was found wrong with it."""
        self._shown.append((chunk_index, cache_epoch))
        first = chunk_index + 2 - self._within  # the next error comes with the next chunk
        while self._shown and self._shown[0][0] < first:
            self._shown.popleft()
        while self._sent and self._sent[0].envelope.chunk_index < first:
            self._sent.popleft()

    def retraction(self, reason: str) -> Retraction | None:
        """Of all unverified chunks that were shown; None where there are none."""
        if not self._shown:
            return None
        (first, first_epoch), (last, last_epoch) = self._shown[0], self._shown[-1]
        return Retraction(
            first_chunk=first,
            last_chunk=last,
            first_epoch=first_epoch,
            last_epoch=last_epoch,
            reason=reason,
        )
