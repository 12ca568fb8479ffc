"""Whoever writes down what rank0 does sees it all, in order, and never raises into the loop."""

from typing import Protocol

from scope_contracts.envelope import PPEnvelope
from scope_rt.control.chunk import Chunk
from scope_rt.control.inbox import Directive


class StreamRecorder(Protocol):
    """What the controller tells; `scope_rt.record.recorder` writes it to a file."""

    @property
    def failure(self) -> str | None:
        """Why recording ended early, in one sentence."""
        ...

    def control(self, chunk_index: int, directive: Directive) -> None: ...

    def planned(self, envelope: PPEnvelope) -> None: ...

    def finished(self, chunk: Chunk) -> None: ...

    def dropped(self, envelope: PPEnvelope) -> None: ...

    def failed(self, error: BaseException) -> None: ...

    def close(self) -> None: ...


class NullRecorder:
    """Writes nothing down."""

    failure: str | None = None

    def control(self, chunk_index: int, directive: Directive) -> None: ...

    def planned(self, envelope: PPEnvelope) -> None: ...

    def finished(self, chunk: Chunk) -> None: ...

    def dropped(self, envelope: PPEnvelope) -> None: ...

    def failed(self, error: BaseException) -> None: ...

    def close(self) -> None: ...
