"""What writes down a stream, as those see it who append to it; how, is `stream_log`."""

from collections.abc import Callable
from typing import Protocol

from scope_contracts.log_records import Record


class Log(Protocol):
    """What writes down a stream, as those see it who append to it."""

    @property
    def offset(self) -> int: ...

    @property
    def failure(self) -> str | None: ...

    @property
    def latents_failure(self) -> str | None: ...

    def append(self, record: Record, blob: bytes = b"") -> None: ...

    def write_soon(self) -> None: ...

    def when_written(self, call: Callable[[int], None]) -> Callable[[], None]: ...

    def close(self) -> None: ...


def _done() -> None: ...


class NullLog:
    """Writes nothing down."""

    offset = 0
    failure: str | None = None
    latents_failure: str | None = None

    def append(self, record: Record, blob: bytes = b"") -> None: ...

    def write_soon(self) -> None: ...

    def when_written(self, call: Callable[[int], None]) -> Callable[[], None]:
        """Nothing has to be written first: calls at once, on this thread."""
        call(self.offset)
        return _done

    def close(self) -> None: ...
