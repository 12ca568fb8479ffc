"""A chunk that was computed wrong is refused, whichever kernel, flag, position or row was wrong.

Where the level is strict, all tokens of every layer and call are computed again, when the chunk
ends; else one token of one layer and call in turn. They are held against what the kernels gave and
the cache kept. What all-reduces gave and got is summed for the comparison of ranks. Blocks that are
not audited run as if there were no audit.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from scope_contracts.arithmetic import Deviation, ReducedSum
from scope_contracts.envelope import LATENTS_IN, PPEnvelope
from scope_contracts.errors import IntegrityError
from scope_contracts.integrity import IntegrityLevel
from scope_rt.checks import Checks
from scope_rt.integrity.audit_plan import (
    Audit,
    CallPlan,
    RecomputeTurns,
    audit_in_turn,
    whole_audits,
)
from scope_rt.integrity.block_record import BlockRecord
from scope_rt.integrity.call_weights import BlockWeights
from scope_rt.integrity.oracle import BlockAudit, Stage
from scope_rt.integrity.recorder import BlockRecorder
from scope_rt.integrity.reduced_sums import ReducedSums, reduced_sums_of
from scope_rt.integrity.shown_rows import ShownRows
from scope_rt.integrity.tolerance import Rounding
from scope_rt.models.causal_wan import Block
from scope_rt.models.generator import ChunkGenerator

_MOST_WAITING_BYTES = 64 << 20
"""That records may hold before they are computed again: a query leaves as many numbers as the text
has tokens, in every head."""


class _Held(NamedTuple):
    """What some records came to; on their device until the chunk ends."""

    records: list[BlockRecord]
    stages: list[Stage]
    is_right: Tensor
    sums: list[ReducedSums]


class ArithmeticCheck:
    """One generator rank's audit: `begin` before a chunk, `end` after it, then `report`.

    In `default` every (layer, call) has its turn within layers x calls x `every` chunks, and a
    recompute whenever it happens. Build it when the weights are loaded and verified: it remembers
    their sums, and in time, on the device, about 140 bytes a channel of each layer and call and a
    copy of the text's keys, in float32.
    """

    def __init__(
        self,
        generator: ChunkGenerator,
        *,
        level: IntegrityLevel,
        rank: int,
        checks: Checks | None = None,
        every: int = 1,
    ) -> None:
        """`every` is the number of chunks to one that is audited in `default`."""
        self._generator, self._level, self._rank = generator, level, rank
        self._every = 1 if level is IntegrityLevel.STRICT else every
        self._checks = checks or Checks()
        self._rounding = Rounding.of(generator.model.dtype)
        self._chunk = 0
        self._calls: Sequence[CallPlan] = []
        self._recorder: BlockRecorder | None = None
        self._waiting: list[BlockRecord] = []
        self._num_waiting_bytes = 0
        self._held: list[_Held] = []
        self._sums: tuple[ReducedSum, ...] = ()
        self._blocks: list[Block] = []
        self._weights: BlockWeights | None = None
        if level is not IntegrityLevel.OFF:
            self._blocks = [each for each in generator.model.blocks if isinstance(each, Block)]
            self._weights = BlockWeights(self._blocks)
        self._recomputes = RecomputeTurns(num_layers=len(self._blocks), every=self._every)

    def begin(
        self, envelope: PPEnvelope, tensors: Mapping[str, Tensor], plans: Sequence[CallPlan]
    ) -> None:
        """Watch the blocks that are audited in this chunk, of whose calls `plans` has one each."""
        self.abandon()
        if self._level is IntegrityLevel.OFF:
            return
        self._chunk = envelope.chunk_index
        self._calls = plans
        audits = self._audits(tensors[LATENTS_IN].shape[0])
        if audits and self._weights is not None:
            watched = {audit.layer: self._blocks[audit.layer] for audit in audits}
            self._recorder = BlockRecorder(
                self._generator, self._weights, watched, audits, self._calls, self._take
            )

    def _audits(self, batch: int) -> list[Audit]:
        """Those of the chunk that begins, in the order in which blocks are entered."""
        num_layers = len(self._blocks)
        if self._level is IntegrityLevel.STRICT:
            return whole_audits(num_layers, len(self._calls))
        audits: list[Audit] = []
        if self._calls[0].block_frames:
            audits += self._recomputes.audits(self._chunk, self._calls[0], batch=batch)
        if not self._chunk % self._every:
            turn = self._chunk // self._every
            audits.append(
                audit_in_turn(turn, num_layers=num_layers, calls=self._calls, batch=batch)
            )
        return sorted(audits, key=lambda audit: (audit.call, audit.layer))

    def end(self) -> None:
        """Compute again what was watched; the cache must have advanced.

        Raises:
            IntegrityError: naming chunk, rank, call, layer, token and stage.
        """
        recorder = self._recorder
        if recorder is None:
            self.abandon()
            return
        self._hold()
        self._check_whole(recorder.records)
        held, missed = self._held, recorder.missed()
        self.abandon()
        for each in held:
            self._judge(each)
        rows = self._rows()
        rows.check_past(recorder.records, self._where)
        if missed is not None:
            wanted, entered = missed
            self._checks.arithmetic(
                Deviation(
                    where=self._where(wanted),
                    stage="the layer that was entered in this turn",
                    got=math.nan if entered is None else entered,
                    want=wanted.layer,
                    bound=0.0,
                )
            )
        for given in recorder.last_given:
            audit = given.audit
            rows.check_kept(given, self._calls[audit.call], self._where(audit))
        sums = [sums for each in held for sums in each.sums]
        self._sums = tuple(one for each in sums for one in each.on_host())

    def abandon(self) -> None:
        """Watch nothing any more, as after a chunk that failed."""
        if self._recorder is not None:
            self._recorder.stop()
        self._recorder, self._held, self._sums = None, [], ()
        self._waiting, self._num_waiting_bytes = [], 0

    @property
    def suspect_from(self) -> int:
        """The first chunk since a token of the same layer and call was looked at: turns follow from
        the chunk's index, so an earlier process had them too."""
        if self._level is IntegrityLevel.STRICT:
            return self._chunk
        return self._chunk + 1 - len(self._blocks) * len(self._calls) * self._every

    def report(self) -> tuple[ReducedSum, ...]:
        """The last chunk's all-reduces, for `Checks.reduced_sums`; empty in a group of one."""
        return self._sums

    def _take(self, record: BlockRecord) -> None:
        """A block that is watched has ended."""
        self._waiting.append(record)
        self._num_waiting_bytes += record.num_bytes
        if self._num_waiting_bytes > _MOST_WAITING_BYTES:
            self._hold()

    @torch.inference_mode()
    def _hold(self) -> None:
        """Compute the records that wait again, and let go of what they hold; waits for no
        device."""
        assert self._weights is not None
        whole = [record for record in self._waiting if not record.fault]
        for _, each in groupby(whole, key=_alike):
            some = list(each)
            stages = list(BlockAudit(self._weights, some, self._rounding).stages())
            got, want, bound = (
                torch.cat([getattr(stage, name).expand_as(stage.got) for stage in stages], dim=-1)
                for name in ("got", "want", "bound")
            )
            is_right = ((got - want).abs_() <= bound).all()
            sums = reduced_sums_of(some, self._rounding)
            self._held.append(_Held(some, stages, is_right, sums))
        for record in self._waiting:
            record.text_scores = None
        self._waiting, self._num_waiting_bytes = [], 0

    def _check_whole(self, records: Sequence[BlockRecord]) -> None:
        for record in records:
            if record.fault:
                where = self._where(record.audit)
                raise IntegrityError(f"{where}: the block computed {record.fault}")

    def _rows(self) -> ShownRows:
        assert self._weights is not None
        return ShownRows(self._generator, self._weights, self._rounding, self._checks)

    def _where(self, audit: Audit, token: int | None = None) -> str:
        where = f"chunk {self._chunk}, rank {self._rank}, call {audit.call}, layer {audit.layer}"
        token = audit.token if token is None else token
        return where if token is None else f"{where}, token {token}"

    def _judge(self, held: _Held) -> None:
        """The first stage of the first call and layer that is off is where the fault is."""
        for record in held.records:
            self._check_inputs(record)
        if bool(held.is_right):
            return
        for number, record in enumerate(held.records):
            for stage in held.stages:
                self._check_stage(record, stage, number)

    def _check_stage(self, record: BlockRecord, stage: Stage, number: int) -> None:
        got, want = stage.got[number], stage.want[number]
        excess = (got - want).abs() - stage.bound.expand_as(stage.got)[number]
        if bool((excess <= 0).all()):
            return
        token, column = divmod(int(excess.argmax()), excess.shape[-1])
        check = self._checks.linear_sums if stage.is_linear else self._checks.arithmetic
        where_token = token % record.plan.num_tokens if record.audit.token is None else None
        check(
            Deviation(
                where=self._where(record.audit, where_token),
                stage=stage.name,
                got=float(got[token, column]),
                want=float(want[token, column]),
                bound=float(stage.bound.expand_as(stage.got)[number, token, column]),
            )
        )

    def _check_inputs(self, record: BlockRecord) -> None:
        """A block gets what the one before gave, and what was made for its layer and call."""
        changed = sum(map(bool, record.differ))
        if changed:
            where = self._where(record.audit)
            self._checks.cached_rows(where, "rows that attention saw changed", changed, 0, 0)
        layer = record.audit.layer
        text = self._generator.text[layer]
        modulation = self._generator.modulations[record.plan.timestep].layers[layer]
        inputs = [
            ("modulation", record.modulation, modulation),
            ("text keys", record.text.k, text.k),
            ("text values", record.text.v, text.v),
        ]
        if record.not_before is not None:
            inputs.append(("block input", *record.not_before))
        for name, got, want in inputs:
            if got.data_ptr() == want.data_ptr() and got.shape == want.shape:
                continue
            off = (got.double() - want.double()).abs() if got.shape == want.shape else None
            if off is not None and bool((off == 0).all()):
                continue
            at = 0 if off is None else int(off.argmax())
            self._checks.arithmetic(
                Deviation(
                    where=self._where(record.audit),
                    stage=name,
                    got=float(got.flatten()[at]),
                    want=float(want.flatten()[at]),
                    bound=0.0,
                )
            )


def _alike(record: BlockRecord) -> tuple[object, ...]:
    """Records of as many tokens, or one token, are computed again together."""
    return (
        record.plan.num_tokens,
        record.plan.block_frames,
        record.audit.batch,
        record.audit.token,
    )
