"""A live consumer says which chunks may be begun; by default a stream runs as fast as it can."""

from typing import Protocol


class Pace(Protocol):
    """Asked by the thread that iterates a stream, before each chunk is planned."""

    def may_begin(self, chunk_index: int) -> bool:
        """Whether this chunk may be planned now; never blocks."""
        ...

    def wait(self, chunk_index: int) -> bool:
        """Block until this chunk may be planned; False ends the stream in order, before it.

        Ranks wait meanwhile, `idle_timeout_s` at most.
        """
        ...


class FlatOut:
    """Every chunk may be begun at once."""

    def may_begin(self, chunk_index: int) -> bool:
        """Always."""
        return True

    def wait(self, chunk_index: int) -> bool:
        """Without waiting."""
        return True
