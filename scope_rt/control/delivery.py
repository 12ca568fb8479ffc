"""A chunk is pending from its arrival until the consumer acknowledged it: a restart skips none.

The consumer acknowledges by a count, so that one which writes a video says what is whole on disk.
"""

import math
from collections import deque
from collections.abc import Callable

from scope_contracts.errors import UserInputError
from scope_rt.control.chunk import Arrived


class Delivery:
    """How far the consumer of one `stream()` call has come, in chunks since it began."""

    def __init__(self) -> None:
        self.num_delivered = 0
        """Chunks that were decoded for the consumer, the one it is about to get included."""
        self.pending: deque[Arrived] = deque()
        """Delivered chunks that the consumer has not acknowledged, oldest first."""
        self._num_wanted = math.inf
        self._count_acknowledged: Callable[[], int] | None = None

    @property
    def num_acknowledged(self) -> int:
        """Delivered chunks that are not pending."""
        return self.num_delivered - len(self.pending)

    def begin(self) -> None:
        """Count anew; chunks of an earlier call are no longer pending."""
        self.num_delivered = 0
        self.pending.clear()

    def resume(self, pending: tuple[Arrived, ...], *, num_acknowledged: int) -> None:
        """Continue where an earlier process left its consumer."""
        self.pending = deque(pending)
        self.num_delivered = num_acknowledged + len(pending)

    def ask(self, num_chunks: int | None, acknowledged: Callable[[], int] | None) -> None:
        """The consumer wants `num_chunks` (None: without end), and says what it has acknowledged.

        By default that is all but the chunk it was given last.
        """
        self._num_wanted = math.inf if num_chunks is None else num_chunks
        self._count_acknowledged = acknowledged

    def wants_more(self, num_under_way: int = 0) -> bool:
        """Whether the consumer wants more than what it has got and what is under way."""
        return self.num_delivered + num_under_way < self._num_wanted

    def add(self, arrived: Arrived) -> None:
        """One more chunk is decoded; it is pending."""
        self.pending.append(arrived)
        self.num_delivered += 1

    def drop_acknowledged(self, *, num_kept: int = 1) -> None:
        """What the consumer has acknowledged is no longer pending; the `num_kept` newest chunks
        are, of which it does not know yet."""
        reported = (
            self.num_delivered if self._count_acknowledged is None else self._count_acknowledged()
        )
        acknowledged = min(reported, self.num_delivered - num_kept)
        while self.pending and self.num_acknowledged < acknowledged:
            self.pending.popleft()

    def retract(self, num_chunks: int) -> None:
        """The newest chunks count as never delivered: they will be made again."""
        self.num_delivered -= num_chunks
        for _ in range(min(num_chunks, len(self.pending))):
            self.pending.pop()

    def missing(self) -> tuple[Arrived, ...]:
        """After a restart: the pending chunks that the consumer lacks, oldest first.

        Raises:
            UserInputError: it lacks some that are no longer kept, or has some that would be made
                again, because the log of the stream ended before they were delivered.
        """
        acknowledged = self.num_acknowledged
        if self._count_acknowledged is not None and self.pending:
            acknowledged = self._count_acknowledged()
        if acknowledged < self.num_acknowledged:
            raise UserInputError(
                f"the consumer holds {acknowledged} chunks, and the stream to resume was "
                f"acknowledged up to {self.num_acknowledged}; start a new stream"
            )
        if acknowledged > self.num_delivered:
            raise UserInputError(
                f"the consumer holds {acknowledged} chunks, and the stream to resume is known up "
                f"to {self.num_delivered} only; drop the others there, or start a new stream"
            )
        return tuple(self.pending)[acknowledged - self.num_acknowledged :]
