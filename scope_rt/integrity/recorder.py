"""Blocks that are audited in a call are watched from outside; all others run as if nothing were.

What passes is summed at once, while it is at hand. Nothing waits for a device.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from scope_rt.collectives import Collectives
from scope_rt.integrity.audit_plan import Audit, CallPlan
from scope_rt.integrity.block_record import BlockRecord, GivenRows
from scope_rt.integrity.call_weights import BlockWeights, Seen
from scope_rt.integrity.oracle_attention import attended, key_biases, of_batch, turned
from scope_rt.models.causal_wan import Block, TextKV
from scope_rt.models.generator import (
    BlockCausalSelfAttention,
    CachedSelfAttention,
    ChunkGenerator,
)

Attend = CachedSelfAttention | BlockCausalSelfAttention


class _WatchedGroup:
    """The group of a block that is watched: keeps what is summed, and what comes back."""

    def __init__(self, group: Collectives, recorder: "BlockRecorder") -> None:
        self._group, self._recorder = group, recorder
        self.rank, self.size = group.rank, group.size

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        record = self._recorder.record
        if record is None:
            return self._group.all_reduce_sum(tensor)
        return record.take_reduced(tensor, self._group.all_reduce_sum, self.size)


class BlockRecorder:
    """Watches the blocks that `audits` name, for the calls of one chunk."""

    def __init__(
        self,
        generator: ChunkGenerator,
        weights: BlockWeights,
        blocks: Mapping[int, Block],
        audits: Sequence[Audit],
        calls: Sequence[CallPlan],
        take: Callable[[BlockRecord], None],
    ) -> None:
        """`take` is given each record when its block ends."""
        self.records: list[BlockRecord] = []
        self.record: BlockRecord | None = None
        """That of the block that is running."""
        self.last_given: list[GivenRows] = []
        """By layer, where the last call was watched."""
        self._generator, self._weights = generator, weights
        self._audits = {(audit.call, audit.layer): audit for audit in audits}
        self._due = list(audits)
        self._calls, self._take = calls, take
        self._num_entered = dict.fromkeys(blocks, 0)
        self._last_layer = -1
        self._last_output: Tensor | None = None
        self._biases: dict[tuple[object, ...], Tensor] = {}
        self._turned: dict[tuple[object, ...], Tensor] = {}
        self._groups = [(block, block.group) for block in blocks.values()]
        self._handles: list[RemovableHandle] = []
        for layer, block in blocks.items():
            self._watch(layer, block)

    def _watch(self, layer: int, block: Block) -> None:
        block.group = _WatchedGroup(block.group, self)
        self._handles += [
            block.register_forward_pre_hook(partial(self._before, layer)),
            block.register_forward_hook(self._after),
            block.norm2.register_forward_pre_hook(self._keep_input),
        ]
        up = block.ffn.net[0]["proj"]  # type: ignore[index]
        for linear, what in (
            (block.attn1.to_q, Seen.Q_PRODUCT),
            (block.attn1.to_k, Seen.K_PRODUCT),
            (block.attn2.to_q, Seen.TEXT_Q_PRODUCT),
            (up, Seen.UP),
        ):
            self._handles.append(linear.register_forward_hook(partial(self._keep_product, what)))

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        for block, group in self._groups:
            block.group = group
        self._handles, self._groups, self.record = [], [], None

    def missed(self) -> tuple[Audit, int | None] | None:
        """The first audit whose block was not entered in its turn, and the layer that was."""
        entered = [record.audit for record in self.records]
        for number, audit in enumerate(self._due):
            if number >= len(entered):
                return audit, None
            if entered[number] != audit:
                return audit, entered[number].layer
        return None

    def _before(
        self, layer: int, block: nn.Module, args: tuple[Any, ...]
    ) -> tuple[Any, ...] | None:
        call = self._num_entered[layer]
        self._num_entered[layer] += 1
        audit = self._audits.get((call, layer))
        if audit is None:
            self._last_output = None
            return None
        x, mod, rope, text, attend = args
        before = self._last_output if layer == self._last_layer + 1 else None
        self.record = self._record_of(audit, x, mod, text)
        if before is not None and before is not x:
            self.record.not_before = (x, before)
        return x, mod, rope, text, partial(self._attend, attend)

    def _record_of(self, audit: Audit, x: Tensor, mod: Tensor, text: TextKV) -> BlockRecord:
        plan, layer, weights = self._calls[audit.call], audit.layer, self._weights
        made = self._generator.modulations[plan.timestep]
        record = BlockRecord(
            audit=audit,
            plan=plan,
            batch=x.shape[0],
            dtype=weights.dtype,
            modulation=mod,
            text=text,
            weights=weights.of_call(layer, plan.timestep, made),
            text_weights=weights.of_text(layer, self._generator.text[layer]),
            bias_after_text=weights.text_to_out.bias_LR[layer],
            workspace=self._weights.workspace,
        )
        record.take_tensor(Seen.INPUT, x)
        return record

    def _after(self, block: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        record, self.record = self.record, None
        if record is None:
            return
        record.take_tensor(Seen.OUTPUT, out)
        self._last_layer, self._last_output = record.audit.layer, out
        self.records.append(record)
        self._take(record)

    def _keep_product(self, what: Seen, linear: nn.Module, args: Any, out: Tensor) -> None:
        if self.record is not None:
            self.record.take_tensor(what, out)

    def _keep_input(self, norm: nn.Module, args: tuple[Tensor, ...]) -> None:
        if self.record is not None:
            self.record.take_tensor(Seen.AFTER_ATTENTION, args[0])

    def _attend(self, attend: Attend, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        record = self.record
        if record is None:
            return attend(layer, q, k, v)
        shown: list[tuple[Tensor, Tensor]] = []
        ignore, attend.see_rows = attend.see_rows, lambda *rows: shown.append(rows)
        out = attend(layer, q, k, v)
        attend.see_rows = ignore
        if record.attended is not None:
            record.repeated = "attention"
        record.window = attend.window
        if record.audit.call + 1 == len(self._calls):
            given = GivenRows(audit=record.audit, window=attend.window, k=k, v=v)
            self.last_given.append(given)
        self._look_at(record, (q, k, v), shown[-1], out)
        return out

    def _look_at(
        self,
        record: BlockRecord,
        qkv: tuple[Tensor, Tensor, Tensor],
        shown: tuple[Tensor, Tensor],
        out: Tensor,
    ) -> None:
        weights, window, batch = self._weights, _known(record.window), record.audit.batch
        q, k, v = qkv
        record.differ = [
            _differ(rows[:, segment.slots], given[:, segment.sources])
            for segment in window.segments
            for rows, given in zip(shown, (k, v), strict=True)
        ]
        turned_signs = self._turned_signs(record)
        record.turned_sums = [
            self._turned_sum(record.rows(x.flatten(2)), turned_signs) for x in (q, k)
        ]
        record.take_tensor(Seen.VALUES, v.flatten(2))
        rows = record.rows(out.flatten(2))
        record.take(Seen.ATTENTION, rows)
        record.attention_sums = rows.view(-1, q.shape[2], q.shape[3]) @ weights.head_signs_DK
        shown = of_batch(shown, batch, weights.dtype)
        queries = record.rows(q.flatten(2)).view(shown[0].shape[0], -1, *q.shape[2:])
        record.attended = attended(
            queries,
            shown,
            self._biases_of(record),
            weights.head_signs_DK,
            self._weights.workspace,
        )

    def _turned_sum(self, rows_NC: Tensor, signs_TC: Tensor) -> Tensor:
        rows = rows_NC.view(-1, *signs_TC.shape)
        products = torch.mul(
            rows, signs_TC, out=self._weights.workspace.like(tuple(rows.shape), rows)
        )
        return products.sum(-1).view(-1)

    def _tokens(self, record: BlockRecord) -> Sequence[int]:
        """Of one batch row."""
        token = record.audit.token
        return range(record.plan.num_tokens) if token is None else [token]

    def _biases_of(self, record: BlockRecord) -> Tensor:
        window = _known(record.window)
        plan = record.plan
        key = (id(window), plan.log_bias, plan.block_frames, record.audit.token)
        if key not in self._biases:
            biases = key_biases(plan, window, self._tokens(record))
            self._biases[key] = biases.to(self._weights.device, self._weights.dtype)
        return self._biases[key]

    def _turned_signs(self, record: BlockRecord) -> Tensor:
        """The first sum's signs, turned as every token's channels must be: `[N, C]`."""
        plan = record.plan
        key = (plan.first_frame, plan.num_frames, record.audit.token)
        if key not in self._turned:
            positions = [plan.position(token) for token in self._tokens(record)]
            made = torch.from_numpy(turned(self._weights.first_signs_HD, positions)).flatten(1)
            self._turned[key] = made.to(self._weights.device, self._weights.dtype)
        return self._turned[key]


def _differ(rows: Tensor, given: Tensor) -> Tensor | bool:
    """Without waiting for a device."""
    return (rows != given).any() if rows.is_cuda else not torch.equal(rows, given)


T = TypeVar("T")


def _known(value: T | None) -> T:
    assert value is not None
    return value
