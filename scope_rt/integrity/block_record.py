"""One call of one block, as the tensors that passed while it ran.

They are kept as they are until the block ends, and summed then: see `token_sums`. What is written
in place before is copied; of attention, which would keep the whole cache, sums are taken at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from scope_rt.integrity.audit_plan import Audit, CallPlan
from scope_rt.integrity.call_weights import Seen
from scope_rt.integrity.oracle_attention import Attended
from scope_rt.kv_cache.frame_cache import WriteWindow
from scope_rt.models.causal_wan import TextKV

ALL_REDUCES = (None, Seen.PROJECTED, None, Seen.TEXT_PROJECTED, Seen.DOWN)
"""The all-reduces of a block, in order; None is one of sums of squares."""
OBSERVED = tuple(each for each in Seen if each not in (Seen.AFTER_TEXT, Seen.ACTIVATION))
"""These two follow from others."""


@dataclass(slots=True, kw_only=True)
class BlockRecord:
    """One call of one block; tensors are on the model's device, with all tokens of all batch rows
    unless the audit's own are meant."""

    audit: Audit
    plan: CallPlan
    modulation: Tensor
    text: TextKV
    turned_signs_TC: Tensor
    """What turned queries and keys are summed by: of the audit's tokens in one batch row."""
    not_before: tuple[Tensor, Tensor] | None = None
    """The block's input and what the block before gave, where they are not one tensor."""
    seen: dict[Seen, Tensor] = field(default_factory=dict)
    """What was given, where it is summed over ranks."""
    got: dict[Seen, Tensor] = field(default_factory=dict)
    """What came back from an all-reduce, where there are other ranks."""
    squares: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Of q and k, then of the text's q: given and got `[1 or 2, B, T, 1]`."""
    attended: Attended | None = None
    first: Attended | None = None
    """Of the first call that was shown the same past rows."""
    window: WriteWindow | None = None
    differ: list[Tensor | bool] = field(default_factory=list)
    """Whether runs of the chunk's keys and values are other than those given, once attention has
    seen them."""
    repeated: str = ""
    """What was observed more than once."""

    @property
    def row(self) -> int | None:
        """The audit's among those of all batch rows."""
        if self.audit.token is None:
            return None
        return (self.audit.batch or 0) * self.plan.num_tokens + self.audit.token

    def own_rows(self, tensor_BT: Tensor) -> Tensor:
        """The audit's token `[1, 1, ...]`, or all `[B, T, ...]`."""
        batch, token = self.audit.batch, self.audit.token
        if batch is None or token is None:
            return tensor_BT
        return tensor_BT[batch : batch + 1, token : token + 1]

    def take(self, what: Seen, tensor: Tensor) -> None:
        if what in self.seen:
            self.repeated = what.value
        self.seen[what] = tensor

    def take_reduced(self, given: Tensor, reduce: Callable[[Tensor], Tensor], size: int) -> Tensor:
        """Sums over ranks happen in place, so what is given is copied before."""
        index = len(self.squares) + sum(what in self.seen for what in ALL_REDUCES)
        kept = given if size == 1 else given.clone()
        got = reduce(given)
        if index >= len(ALL_REDUCES):
            self.repeated = "an all-reduce"
            return got
        what = ALL_REDUCES[index]
        if what is None:
            self.squares.append((kept, got))
            return got
        self.take(what, kept)
        if size > 1:
            self.got[what] = got
        return got

    @property
    def num_bytes(self) -> int:
        """Of what is kept until sums are taken of it."""
        return sum(each.nbytes for each in (*self.seen.values(), *self.got.values()))

    def forget(self) -> None:
        """Let go of that."""
        self.seen, self.got = {}, {}

    @property
    def fault(self) -> str:
        """What the block computed more than once, or did not, though every block does; "" where it
        is whole."""
        if self.repeated:
            return f"{self.repeated} more than once"
        missing = [each.value for each in OBSERVED if each not in self.seen]
        if len(self.squares) != 2 or self.attended is None:
            missing.append("attention")
        return f"no {', '.join(missing)}" if missing else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenRows:
    """Keys and values of the whole chunk as its last call gave them to the cache."""

    audit: Audit
    window: WriteWindow
    k: Tensor
    v: Tensor
