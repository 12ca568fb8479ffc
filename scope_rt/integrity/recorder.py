"""A block that is audited in a call is watched from outside; all others run as if nothing were.

What is kept of a call is one token's numbers. Nothing waits for a device here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from scope_rt.collectives import Collectives
from scope_rt.integrity.audit_plan import Audit, CallPlan
from scope_rt.integrity.oracle_attention import attended, log_biases
from scope_rt.integrity.reduced_sums import ReducedPair
from scope_rt.models.causal_wan import Block, TextKV
from scope_rt.models.generator import BlockCausalSelfAttention, CachedSelfAttention

Attend = CachedSelfAttention | BlockCausalSelfAttention


@dataclass(slots=True, kw_only=True)
class BlockRecord:
    """One token of one call as its block had it; tensors are on the model's device."""

    audit: Audit
    plan: CallPlan
    text: TextKV
    inputs: tuple[Tensor, Tensor]
    """The token's row, and its shifts, scales and gates `[6, C]`."""
    qkv_HD: tuple[Tensor, Tensor, Tensor] | None = None
    """As given to attention."""
    attention_HD: tuple[Tensor, Tensor, Tensor] | None = None
    """What attention gave, what it must give, and the largest key and value."""
    keys: tuple[int, float] = (0, 0.0)
    """Their number, and the largest bias."""
    changed_rows: list[Tensor | bool] = field(default_factory=list)
    """Whether runs of the chunk's keys and values are other than those given, once attention has
    seen them."""
    given: tuple[Tensor, Tensor] | None = None
    """Keys and values of the whole chunk."""
    reduced_rows: list[Tensor] = field(default_factory=list)
    """What each all-reduce was given and gave back, of this token; once in a group of one."""
    products: list[Tensor] = field(default_factory=list)
    """What `to_q`, `to_k`, the text's `to_q` and the first layer of the feed-forward gave."""
    pairs: list[ReducedPair] = field(default_factory=list)
    out_C: Tensor | None = None

    def row(self, tensor: Tensor) -> Tensor:
        """The token's, of a tensor over all tokens with one or more planes in front."""
        batch, num_tokens = self.audit.batch, self.plan.num_tokens
        planes = tensor.reshape(-1, self.text.k.shape[0] * num_tokens, tensor.shape[-1])
        return planes[:, batch * num_tokens + self.audit.token]

    def flat(self) -> Tensor:
        """All numbers of the token in one float64 vector, so that one copy brings them over."""
        assert self.qkv_HD is not None
        assert self.attention_HD is not None
        assert self.out_C is not None
        parts = (
            *self.inputs, *self.qkv_HD, *self.attention_HD, *self.reduced_rows,
            *self.products, self.out_C
        )  # fmt: skip
        return torch.cat([part.reshape(-1) for part in parts]).double().cpu()


class _WatchedGroup:
    """The group of a block that is watched: keeps what is summed, and what comes back."""

    def __init__(self, group: Collectives, record: BlockRecord) -> None:
        self._group, self._record = group, record
        self.rank, self.size = group.rank, group.size

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        record = self._record
        if self.size == 1:
            got = self._group.all_reduce_sum(tensor)
            record.reduced_rows.append(record.row(got))
            return got
        given_row, given = record.row(tensor).clone(), ReducedPair.of(tensor)
        got = self._group.all_reduce_sum(tensor)
        record.reduced_rows += [given_row, record.row(got)]
        record.pairs.append(given.with_result(got))
        return got


class BlockRecorder:
    """Watches one block for the calls of a chunk in which a token of it is audited."""

    def __init__(self, block: Block, audits: Sequence[Audit], calls: Sequence[CallPlan]) -> None:
        self.records: list[BlockRecord] = []
        self._by_call = {audit.call: audit for audit in audits}
        self._calls, self._block, self._group = calls, block, block.group
        up = block.ffn.net[0]["proj"]  # type: ignore[index]
        self._linears = (block.attn1.to_q, block.attn1.to_k, block.attn2.to_q, up)
        self._num_calls, self._of_call = 0, list[RemovableHandle]()
        self._handles: list[RemovableHandle] = [
            block.register_forward_pre_hook(self._before),
            block.register_forward_hook(self._after),
        ]

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._end_call()

    def _end_call(self) -> None:
        for handle in self._of_call:
            handle.remove()
        self._block.group, self._of_call = self._group, []

    def _before(self, block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        call = self._num_calls
        self._num_calls += 1
        audit = self._by_call.get(call)
        if audit is None:
            return None
        x, mod, rope, text, attend = args
        plan = self._calls[call]
        frame, place = divmod(audit.token, x.shape[2])
        row = x[audit.batch, frame, place]
        mod_6C = mod[:, audit.batch, frame if mod.shape[2] > 1 else 0, 0]
        record = BlockRecord(audit=audit, plan=plan, text=text, inputs=(row, mod_6C))
        self.records.append(record)
        self._block.group = _WatchedGroup(self._group, record)
        keep = partial(_keep_product, record)
        self._of_call = [linear.register_forward_hook(keep) for linear in self._linears]
        return x, mod, rope, text, self._watched(attend, record)

    def _after(self, block: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        if self._block.group is self._group:
            return
        self._end_call()
        record = self.records[-1]
        record.out_C = out[record.audit.batch].flatten(0, 1)[record.audit.token]

    def _watched(
        self, attend: Attend, record: BlockRecord
    ) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
        def watched(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            shown: list[tuple[Tensor, Tensor]] = []
            attend.see_rows = lambda *rows: shown.append(rows)
            out = attend(layer, q, k, v)
            attend.see_rows = ignore
            at = (record.audit.batch, record.audit.token)
            record.qkv_HD, record.given = (q[at], k[at], v[at]), (k, v)
            self._compare_rows(attend, record, shown[-1])
            own = self._own_attention(attend, record, *shown[-1])
            record.attention_HD = (out[at], *own)
            return out

        ignore = attend.see_rows
        return watched

    def _compare_rows(
        self, attend: Attend, record: BlockRecord, shown: tuple[Tensor, Tensor]
    ) -> None:
        """Read the chunk's rows again, after attention, at the slots of its frames."""
        view, plan = attend.window.frames_in_view, record.plan
        tokens = plan.rows * plan.columns
        first = [view.index(frame) * tokens for frame in self._frames(plan)]
        assert record.given is not None
        runs = _runs(first, tokens)
        record.changed_rows = [
            _differ(rows[:, slot : slot + count], given[:, at : at + count])
            for rows, given in zip(shown, record.given, strict=True)
            for at, slot, count in runs
        ]

    def _frames(self, plan: CallPlan) -> range:
        return range(plan.first_frame, plan.first_frame + plan.num_frames)

    def _own_attention(
        self, attend: Attend, record: BlockRecord, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        plan, (q, _, _), window = record.plan, record.qkv_HD or (None,) * 3, attend.window
        assert q is not None
        biases = log_biases(
            window.frames_in_view,
            first_current=plan.first_frame,
            log_bias=plan.log_bias,
            log_weights=window.log_weights,
        )
        k, v = k[record.audit.batch], v[record.audit.batch]
        if plan.block_frames:
            frame = record.audit.token // (plan.rows * plan.columns)
            num_visible = (frame // plan.block_frames + 1) * plan.block_frames
            biases = biases[:num_visible]
            end = len(biases) * plan.rows * plan.columns
            k, v = k[:end], v[:end]
        record.keys = (k.shape[0], max(map(abs, biases)))
        return attended(q, k, v, biases)


def _keep_product(record: BlockRecord, linear: nn.Module, args: Any, out: Tensor) -> None:
    record.products.append(record.row(out))


def _differ(rows: Tensor, given: Tensor) -> Tensor | bool:
    """Without waiting for a device."""
    return (rows != given).any() if rows.is_cuda else not torch.equal(rows, given)


def _runs(first_slots: Sequence[int], tokens: int) -> list[tuple[int, int, int]]:
    """First token, slot and length of frames that lie side by side."""
    runs: list[tuple[int, int, int]] = []
    for number, slot in enumerate(first_slots):
        at = number * tokens
        if runs and sum(runs[-1][1:]) == slot:
            start, first, count = runs[-1]
            runs[-1] = (start, first, count + tokens)
        else:
            runs.append((at, slot, tokens))
    return runs
