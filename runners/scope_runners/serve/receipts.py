"""A command is answered once, by a receipt that says where it took effect or why it never will."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Self

from scope_runners.serve.messages import Command, CommandKind, Outcome


class ReceiptState(StrEnum):
    """What became of a command."""

    PENDING = "pending"
    APPLIED = "applied"
    SUPERSEDED = "superseded"
    """A later one of its kind took its place before a chunk was planned with it."""
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """Times in seconds since the Unix epoch; chunk and epoch are -1 until they are known."""

    id: str
    kind: CommandKind
    fields: Mapping[str, Any] = field(default_factory=dict)
    """As the command was given."""
    state: ReceiptState = ReceiptState.PENDING
    at_chunk: int = -1
    """A scheduled command is posted before this chunk; -1 at once."""
    chunk_index: int = -1
    cache_epoch: int = -1
    posted_at: float = 0.0
    applied_at: float | None = None
    shown_at: float | None = None
    latency_ms: float | None = None
    """From the post to the first picture of its chunk."""
    error: str = ""
    seq: int = 0
    """Of the event that told of it last."""

    @property
    def is_open(self) -> bool:
        """Whether it is not answered yet."""
        return self.state is ReceiptState.PENDING

    def answered(self, outcome: Outcome, *, now: float) -> Self:
        """The same, once rank0 has said what became of it."""
        if outcome.error:
            return replace(self, state=ReceiptState.REFUSED, error=outcome.error, applied_at=now)
        state = ReceiptState.SUPERSEDED if outcome.superseded else ReceiptState.APPLIED
        return replace(
            self,
            state=state,
            chunk_index=outcome.chunk_index,
            cache_epoch=outcome.cache_epoch,
            applied_at=now,
        )

    def shown(self, *, now: float) -> Self:
        """The same, once the first picture of its chunk is shown."""
        return replace(self, shown_at=now, latency_ms=(now - self.posted_at) * 1e3)

    def to_plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """The inverse, of a journal's fact."""
        kind, state = CommandKind(plain["kind"]), ReceiptState(plain["state"])
        return cls(**{**plain, "kind": kind, "state": state})


def command_of(receipt: Receipt) -> Command:
    """What rank0 is sent of it."""
    return Command(command_id=receipt.id, kind=receipt.kind, **receipt.fields)


OF_RANK0 = frozenset(
    {
        CommandKind.PROMPT,
        CommandKind.HARD_CUT,
        CommandKind.BIAS,
        CommandKind.SEED,
        CommandKind.REWIND,
    }
)
"""The others are obeyed by the server."""
