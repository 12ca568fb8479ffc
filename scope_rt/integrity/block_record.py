"""One call of one block, as the sums that its tensors leave while they pass.

A token's numbers leave a few sums and a length; the tensors themselves are not kept.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from scope_rt.integrity.audit_plan import Audit, CallPlan
from scope_rt.integrity.call_weights import CallWeights, Seen, TextWeights
from scope_rt.integrity.oracle_attention import Attended, Workspace
from scope_rt.kv_cache.frame_cache import WriteWindow
from scope_rt.models.causal_wan import TextKV

REDUCED = (None, Seen.PROJECTED, None, Seen.TEXT_PROJECTED, Seen.DOWN)
"""The all-reduces of a block, in order; None is one of sums of squares."""

_WITHOUT_LENGTH = (Seen.ACTIVATION, Seen.OUTPUT)
"""No bound needs theirs."""


@dataclass(slots=True, kw_only=True)
class BlockRecord:
    """One call of one block; tensors are on the model's device, and have a row for every token.

    Rows are those of all batch rows, or the audit's one; `all_` has all of them in any case.
    """

    audit: Audit
    plan: CallPlan
    batch: int
    dtype: torch.dtype
    """That sums are taken in."""
    modulation: Tensor
    text: TextKV
    weights: CallWeights
    text_weights: TextWeights
    bias_after_text: Tensor
    workspace: Workspace
    not_before: tuple[Tensor, Tensor] | None = None
    """The block's input and what the block before gave, where they are not one tensor."""
    sums: dict[Seen, Tensor] = field(default_factory=dict)
    lengths: dict[Seen, Tensor] = field(default_factory=dict)
    got_sums: dict[Seen, Tensor] = field(default_factory=dict)
    """Of what came back from an all-reduce, where `sums` are of what was given."""
    got_lengths: dict[Seen, Tensor] = field(default_factory=dict)
    all_given: dict[Seen, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Sums and lengths before and after an all-reduce, where there are other ranks."""
    all_got: dict[Seen, tuple[Tensor, Tensor]] = field(default_factory=dict)
    squares: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Of q and k, then of the text's q: given and got `[1 or 2, B, T, 1]`."""
    text_lengths: Tensor | None = None
    """Of the text's q by head."""
    text_scores: Tensor | None = None
    turned_sums: list[Tensor] = field(default_factory=list)
    """Of q and k as attention gets them, by signs that are rotated as they must be."""
    attended: Attended | None = None
    attention_sums: Tensor | None = None
    """Of what attention gave, by head."""
    window: WriteWindow | None = None
    differ: list[Tensor | bool] = field(default_factory=list)
    """Whether runs of the chunk's keys and values are other than those given, once attention has
    seen them."""
    repeated: str = ""
    """What was observed more than once."""
    _after_attention: Tensor | None = None

    @property
    def row(self) -> int | None:
        """The audit's among those of all batch rows."""
        if self.audit.token is None:
            return None
        return (self.audit.batch or 0) * self.plan.num_tokens + self.audit.token

    def rows(self, tensor: Tensor) -> Tensor:
        """`[N, C]`."""
        rows = tensor.view(-1, tensor.shape[-1])
        row = self.row
        if row is not None:
            rows = rows[row : row + 1]
        return rows if rows.dtype == self.dtype else rows.to(self.dtype)

    def take(self, what: Seen, rows_NC: Tensor) -> None:
        if what in self.sums:
            self.repeated = what.value
        self.sums[what] = rows_NC @ self.weights.columns[what]
        if what not in _WITHOUT_LENGTH:
            self.lengths[what] = torch.linalg.vector_norm(rows_NC, dim=-1)

    def take_tensor(self, what: Seen, tensor: Tensor) -> None:
        rows = self.rows(tensor)
        self.take(what, rows)
        if what is Seen.AFTER_ATTENTION:
            self._after_attention = rows
        elif what is Seen.UP:
            self.take(Seen.ACTIVATION, _gelu(rows, self.workspace))
        elif what is Seen.TEXT_Q_PRODUCT:
            self._take_text(rows)

    def _take_text(self, rows_NC: Tensor) -> None:
        batch, heads, dim, _ = self.text_weights.keys_BHDL.shape
        if self.row is not None:
            batch = 1
        q = rows_NC.view(batch, -1, heads, dim).transpose(1, 2)
        self.text_lengths = torch.linalg.vector_norm(q, dim=-1, keepdim=True)
        self.text_scores = q @ self.text_weights.of_batch(self.audit.batch)

    def take_reduced(self, given: Tensor, reduce: Callable[[Tensor], Tensor], size: int) -> Tensor:
        """Sums over ranks happen in place, so what is given is summed before."""
        index = len(self.squares) + len(self.got_sums)
        what = REDUCED[index] if index < len(REDUCED) else None
        if index >= len(REDUCED):
            self.repeated = "an all-reduce"
        if what is None:
            squares = given if size == 1 else given.clone()
            got = reduce(given)
            self.squares.append((squares, got))
            return got
        before = self._all_sums(what, given) if size > 1 else None
        got = reduce(given)
        after = self._all_sums(what, got)
        if before is not None:
            self.all_given[what], self.all_got[what] = before, after
        self.sums[what], self.lengths[what] = self._own(before or after)
        self.got_sums[what], self.got_lengths[what] = self._own(after)
        if what is Seen.TEXT_PROJECTED:
            assert self._after_attention is not None
            step = self.rows(got)
            x = torch.add(
                step, self.bias_after_text, out=self.workspace.like(tuple(step.shape), step)
            )
            self.take(Seen.AFTER_TEXT, x.add_(self._after_attention))
            self._after_attention = None
        return got

    def _all_sums(self, what: Seen, tensor: Tensor) -> tuple[Tensor, Tensor]:
        rows = tensor.view(-1, tensor.shape[-1]).to(self.dtype)
        return rows @ self.weights.columns[what], torch.linalg.vector_norm(rows, dim=-1)

    def _own(self, of_all: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        row = self.row
        if row is None:
            return of_all
        sums, lengths = of_all
        return sums[row : row + 1], lengths[row : row + 1]

    @property
    def num_bytes(self) -> int:
        """Of what is large."""
        return 0 if self.text_scores is None else self.text_scores.nbytes

    @property
    def fault(self) -> str:
        """What the block computed more than once, or did not, though every block does; "" where it
        is whole."""
        if self.repeated:
            return f"{self.repeated} more than once"
        missing = [each.value for each in Seen if each not in self.sums]
        if len(self.squares) != 2 or self.attended is None:
            missing.append("attention")
        return f"no {', '.join(missing)}" if missing else ""


_GELU_CUBIC = 0.044715
_GELU_FACTOR = 2 * (2 / math.pi) ** 0.5


def _gelu(x: Tensor, workspace: Workspace) -> Tensor:
    """Hendrycks and Gimpel (2016), section 2; (1 + tanh y) / 2 is the sigmoid of 2 y."""
    y = torch.mul(x, x, out=workspace.like(tuple(x.shape), x))
    y.mul_(_GELU_FACTOR * _GELU_CUBIC).add_(_GELU_FACTOR)
    return y.mul_(x).sigmoid_().mul_(x)


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenRows:
    """Keys and values of the whole chunk as its last call gave them to the cache."""

    audit: Audit
    window: WriteWindow
    k: Tensor
    v: Tensor
