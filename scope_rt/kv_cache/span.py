"""A cache has at most one open span and at most one fork; what comes out of order is refused.

What a span is, and what a discard must bring back, is the cache's own.
"""

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from scope_contracts.errors import CacheError

SpanT = TypeVar("SpanT")
MarksT = TypeVar("MarksT")


class SpanState(Generic[SpanT, MarksT]):
    """`lacks` is what a layer has not got that no call of the span named, and the call it needs.

    `opener` is the call that opens one.
    """

    def __init__(
        self, lacks: str = "no rows of this span; append them", *, opener: str = "extend"
    ) -> None:
        self._lacks, self._opener = lacks, opener
        self.span: SpanT | None = None
        """The open one."""
        self.written: set[int] = set()
        """Layers that the open span has rows of; always the same set."""
        self.marks: MarksT | None = None
        """Where the cache stood at the fork, while there is one."""

    def opened(self) -> SpanT:
        """The open span; raises `CacheError` when there is none."""
        if self.span is None:
            raise CacheError(f"no span is open; call {self._opener} first")
        return self.span

    def open(self, span: SpanT) -> None:
        """Also instead of one that is open."""
        self.close()
        self.span = span

    def close(self) -> None:
        self.span = None
        self.written.clear()

    def check_closed(self, call: str) -> None:
        if self.span is not None:
            raise CacheError(f"{call}: a span is open; advance first")

    def check_written(self, layers: Iterable[int]) -> None:
        missing = [layer for layer in layers if layer not in self.written]
        if missing:
            raise CacheError(f"advance: layers {missing} got {self._lacks}")

    def fork(self, mark: Callable[[], MarksT]) -> None:
        """Keep what `mark` returns; it is called when nothing speaks against a fork."""
        self.check_closed("fork")
        if self.marks is not None:
            raise CacheError("fork: a speculative span is open; commit or discard it first")
        self.marks = mark()

    def commit(self) -> MarksT:
        """End the fork; returns what was kept for a discard."""
        self.check_closed("commit")
        return self._end_fork("commit")

    def discard(self) -> MarksT:
        """Close the span too; returns what to bring back."""
        marks = self._end_fork("discard")
        self.close()
        return marks

    def reset(self) -> None:
        self.close()
        self.marks = None

    def _end_fork(self, call: str) -> MarksT:
        if self.marks is None:
            raise CacheError(f"{call}: no speculative span is open; fork first")
        marks, self.marks = self.marks, None
        return marks
