"""Blocks that are audited in a call are watched from outside; all others run as if nothing were.

What passes is kept, and of attention what it saw is summed. Nothing waits for a device.
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
from scope_rt.integrity.edge_reference import Estimate
from scope_rt.integrity.frame_reference import frame_masses
from scope_rt.integrity.oracle_attention import (
    Attended,
    Rows,
    attended,
    key_biases,
    largest,
    longest,
    of_batch,
    row_sums,
    turned,
)
from scope_rt.integrity.window_turn import WindowTurn
from scope_rt.models.causal_wan import Block, TextKV
from scope_rt.models.chunk_attention import BlockCausalSelfAttention, CachedSelfAttention
from scope_rt.models.generator import ChunkGenerator
from scope_rt.models.recipe_choices import Positions

Attend = CachedSelfAttention | BlockCausalSelfAttention
Forward = Callable[[Tensor], Tensor]


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
        self.masses: dict[int, Estimate] = {}
        """What the chunk's last call attended to by frame, where the cache asks: by layer."""
        self._generator, self._weights = generator, weights
        self._audits = {(audit.call, audit.layer): audit for audit in audits}
        self._due = list(audits)
        self._calls, self._take = calls, take
        self._num_entered = dict.fromkeys(blocks, 0)
        self._last_layer = -1
        self._last_output: Tensor | None = None
        self.first_shown: dict[tuple[object, ...], Attended] = {}
        """What the first call saw, by layer, window and batch row."""
        self._biases: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}
        self._turned: dict[tuple[object, ...], Tensor] = {}
        self._turns_in_window = generator.positions is Positions.IN_WINDOW
        """Whether attention turns queries and keys, which come unturned."""
        self._window_turns: dict[tuple[object, ...], WindowTurn] = {}
        self._groups = [(block, block.group) for block in blocks.values()]
        self._handles: list[RemovableHandle] = []
        self._forwards: list[tuple[dict[str, Any], Forward | None]] = []
        """Attributes of modules, and what was there."""
        for layer, block in blocks.items():
            self._watch(layer, block)

    def _watch(self, layer: int, block: Block) -> None:
        block.group = _WatchedGroup(block.group, self)
        self._handles += [
            block.register_forward_pre_hook(partial(self._before, layer)),
            block.register_forward_hook(self._after),
        ]
        self._replace_forward(block.norm2, self._keeping_input)
        up = block.ffn.net[0]["proj"]  # type: ignore[index]
        for linear, what in (
            (block.attn1.to_q, Seen.Q_PRODUCT),
            (block.attn1.to_k, Seen.K_PRODUCT),
            (block.attn2.to_q, Seen.TEXT_Q_PRODUCT),
            (up, Seen.UP),
        ):
            self._replace_forward(linear, partial(self._keeping_product, what))

    def _replace_forward(self, module: nn.Module, keeping: Callable[[Forward], Forward]) -> None:
        """A module that has hooks takes several times as long to call. What hooks of others make
        of its result is seen where that is used."""
        own = vars(module)
        self._forwards.append((own, own.get("forward")))
        own["forward"] = keeping(module.forward)

    def stop(self) -> None:
        for own, forward in self._forwards:
            if forward is None:
                del own["forward"]
            else:
                own["forward"] = forward
        self._forwards = []
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
        record = BlockRecord(
            audit=audit,
            plan=self._calls[audit.call],
            modulation=mod,
            text=text,
            turned_signs_TC=self._turned_signs(audit),
        )
        record.take(Seen.INPUT, x)
        return record

    def _after(self, block: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        record, self.record = self.record, None
        if record is None:
            return
        record.take(Seen.OUTPUT, out)
        self._last_layer, self._last_output = record.audit.layer, out
        self.records.append(record)
        self._take(record)

    def _keeping_product(self, what: Seen, forward: Forward) -> Forward:
        def watched(x: Tensor) -> Tensor:
            out = forward(x)
            self._keep(what, out)
            return out

        return watched

    def _keeping_input(self, forward: Forward) -> Forward:
        def watched(x: Tensor) -> Tensor:
            self._keep(Seen.AFTER_ATTENTION, x)
            return forward(x)

        return watched

    def _keep(self, what: Seen, tensor: Tensor) -> None:
        if self.record is not None:
            self.record.take(what, tensor)

    def _attend(self, attend: Attend, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        record = self.record
        if record is None:
            return attend(layer, q, k, v)
        shown: list[Rows] = []
        ignore, attend.see_rows = attend.see_rows, lambda *rows: shown.append(rows)
        out = attend(layer, q, k, v)
        attend.see_rows = ignore
        if record.attended is not None:
            record.repeated = "attention"
        record.window = attend.window
        if record.audit.call + 1 == len(self._calls):
            given = GivenRows(audit=record.audit, window=attend.window, k=k, v=v)
            self.last_given.append(given)
            if self._is_scored(record.audit):
                queries, keys = q, shown[-1][0]
                if attend.turn is not None:
                    queries, keys = attend.turn(queries, keys)
                self.masses[layer] = frame_masses(
                    queries, keys, frame_tokens=record.plan.frame_tokens, dtype=self._weights.dtype
                )
        self._look_at(record, (q, k, v), shown[-1], out)
        return out

    def _is_scored(self, audit: Audit) -> bool:
        """Whether all that this layer attends to is added up: one in turn, where one token is."""
        spec = self._generator.cache.spec
        if not spec.needs_attention_scores:
            return False
        return audit.token is None or audit.token % spec.num_layers == audit.layer

    def _look_at(
        self, record: BlockRecord, given: tuple[Tensor, Tensor, Tensor], shown: Rows, out: Tensor
    ) -> None:
        weights, window, layer = self._weights, _known(record.window), record.audit.layer
        for what, tensor in zip((Seen.Q, Seen.K, Seen.VALUES), given, strict=True):
            record.take(what, tensor)
        record.take(Seen.ATTENTION, out)
        record.differ = [
            _differ(rows[:, segment.slots], new[:, segment.sources])
            for segment in window.segments
            for rows, new in zip(shown, given[1:], strict=True)
        ]
        shown = of_batch(shown, record.audit.batch, weights.dtype)
        queries = record.own_rows(given[0]).to(weights.dtype)
        biases, largest_bias = self._biases_of(record)
        rows = row_sums(shown, weights.head_signs_DK)
        keys, score_error = shown[0], None
        if self._turns_in_window:
            queries, keys, score_error = self._window_turn(record).turned(queries, keys)
        moments = attended(queries, keys, rows[1], biases, weights.workspace)
        key = (layer, id(window), record.audit.batch)
        first = self.first_shown.get(key)
        lengths = (longest(shown[0]), longest(shown[1])) if first is None else first.longest_BH
        made = Attended(moments, rows, lengths, largest_bias, record.audit, window, score_error)
        record.attended = made
        record.first = self.first_shown.setdefault(key, made)

    def _tokens(self, audit: Audit) -> Sequence[int]:
        """Of one batch row."""
        plan = self._calls[audit.call]
        return range(plan.num_tokens) if audit.token is None else [audit.token]

    def _biases_of(self, record: BlockRecord) -> tuple[Tensor, Tensor]:
        """What is added to scores, and its largest."""
        window, plan = _known(record.window), record.plan
        key = (id(window), plan.log_bias, plan.block_frames, record.audit.token)
        if key not in self._biases:
            biases = key_biases(plan, window, self._tokens(record.audit))
            made = biases.to(self._weights.device, self._weights.dtype)
            self._biases[key] = made, largest(made)
        return self._biases[key]

    def _turned_signs(self, audit: Audit) -> Tensor:
        """The first sum's signs, turned as every token's channels must be: `[T, C]`."""
        plan = self._calls[audit.call]
        key = (plan.first_frame, plan.num_frames, audit.token)
        if key not in self._turned:
            positions = [plan.position(token) for token in self._tokens(audit)]
            if self._turns_in_window:
                positions = [_UNTURNED] * len(positions)
            made = torch.from_numpy(turned(self._weights.first_signs_HD, positions)).flatten(1)
            self._turned[key] = made.to(self._weights.device, self._weights.dtype)
        return self._turned[key]

    def _window_turn(self, record: BlockRecord) -> WindowTurn:
        window, plan, token = _known(record.window), record.plan, record.audit.token
        key = (id(window), plan.first_frame, plan.num_frames, token)
        if key not in self._window_turns:
            self._window_turns[key] = WindowTurn(
                plan,
                window,
                self._tokens(record.audit),
                like=self._weights.head_signs_DK.T,
                stored=self._generator.model.dtype,
            )
        return self._window_turns[key]


_UNTURNED = (0, 0, 0)
"""Where nothing is turned."""


def _differ(rows: Tensor, given: Tensor) -> Tensor | bool:
    """Without waiting for a device."""
    return (rows != given).any() if rows.is_cuda else not torch.equal(rows, given)


T = TypeVar("T")


def _known(value: T | None) -> T:
    assert value is not None
    return value
