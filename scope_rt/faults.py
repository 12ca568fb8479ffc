"""The points of the runtime at which a fault can be injected; what a fault does is not known here.

The runtime reaches its points through `Faults.reach`, which returns the value it was given. The
break-it suite (`scope_runners.break_it`) hands in a `Faults` that returns another one, or ends the
process, so that what it breaks is the real thing, on a user's own checkpoint too.
"""

from enum import StrEnum
from typing import Protocol, TypeVar

Value = TypeVar("Value")
BROKEN_ON_PURPOSE = "broken on purpose: "
"""Begins, among the settings that a log opens with, what was done to its stream."""


class FaultPoint(StrEnum):
    """Where a fault can be put, and the value that passes there."""

    START = "start"
    """Before ranks compare settings: `ParityKeys`. Chunk -1."""
    LOADED = "loaded"
    """A generator rank has its weights: the model. Chunk -1."""
    GENERATOR = "generator"
    """A generator rank, before it compares anything: its `ChunkGenerator`."""
    IDLE = "idle"
    """A mesh rank is about to wait for the next envelope; chunk: the last one it ran."""
    TAKEN = "taken"
    """Rank0 plans a chunk with this: `Taken`. Not where `integrity` is off."""
    PLANNED = "planned"
    """Rank0, before preflight: `(PPEnvelope, tensors)`."""
    SENDING = "sending"
    """Rank0, after preflight: the list of `(PPEnvelope, tensors)` to submit."""
    FRAMES = "frames"
    """A link, after digests were taken: the list of tensors about to leave."""
    ENTERED = "entered"
    """A generator rank has admitted `(PPEnvelope, tensors)`, before ranks compare digests."""
    RECOMPUTE = "recompute"
    """A generator rank, before the recompute call: its `FrameCache`."""
    CALL = "call"
    """A generator rank, before every generator call: the number of calls to count for it."""
    RESULT = "result"
    """A generator rank, before it answers: `(PPResult, tensors)`."""
    COLLECTED = "collected"
    """Rank0 has received: `(PPResult, tensors)`."""
    ENCODED = "encoded"
    """Rank0 has encoded a prompt: its embeddings. Chunk -1."""
    ARRIVED = "arrived"
    """Rank0 has checked a result and is about to decode it: `Arrived`."""
    DECODER = "decoder"
    """The same: its `CheckedDecoder`."""
    DECODED = "decoded"
    """Rank0 has decoded a chunk: its frames."""
    EMIT = "emit"
    """Rank0 hands out a chunk: `Chunk`."""
    RECORD = "record"
    """Rank0 writes a recording: the bytes."""


class Faults(Protocol):
    """What the runtime calls at its fault points."""

    def reach(self, point: FaultPoint, chunk: int, value: Value) -> Value: ...


class NoFaults:
    """Nothing is broken on purpose."""

    def reach(self, point: FaultPoint, chunk: int, value: Value) -> Value:
        return value
