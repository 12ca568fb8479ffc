"""A chunk that was computed wrong is refused, whichever kernel, flag, position or row was wrong.

Where the level is strict, all tokens of every layer and call are computed again, when the chunk
ends; else one token of all layers in one call in turn. They are held against what the kernels gave
and the cache kept. What all-reduces gave and got is summed for the comparison of ranks. Blocks that
are not audited run as if there were no audit.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from scope_contracts.arithmetic import Deviation, ReducedSum
from scope_contracts.envelope import LATENTS_IN, PPEnvelope
from scope_contracts.errors import IntegrityError
from scope_contracts.integrity import IntegrityLevel
from scope_rt.checks import Checks
from scope_rt.integrity.audit_plan import Audit, CallPlan, CallTurns, audits_in_turn, whole_audits
from scope_rt.integrity.block_record import BlockRecord
from scope_rt.integrity.block_sums import BlockSums
from scope_rt.integrity.call_weights import BlockWeights
from scope_rt.integrity.edge_reference import Estimate
from scope_rt.integrity.judgement import Compared, judge, text_of
from scope_rt.integrity.oracle import BlockAudit
from scope_rt.integrity.recorder import BlockRecorder
from scope_rt.integrity.reduced_sums import reduced_sums_of
from scope_rt.integrity.shown_rows import ShownRows
from scope_rt.integrity.token_sums import TokenSums, token_sums
from scope_rt.integrity.tolerance import Rounding
from scope_rt.models.causal_wan import Block
from scope_rt.models.generator import ChunkGenerator

_MOST_KEPT_BYTES = 8 << 20
"""That tensors of blocks of one call may have until sums are taken of them together: what a CPU's
caches hold. Those of a block that has more are summed when it ends."""
_MOST_WAITING_BYTES = 64 << 20
"""That blocks may leave until they are looked at together: a query leaves as many numbers as the
text has tokens, in every head."""


class ArithmeticCheck:
    """One generator rank's audit: `begin` before a chunk, `end` after it, then `report`.

    In `default` every call has its turn within calls x `every` chunks, and a recompute unless one
    was looked at in the `every` chunks before it.

    Build it when the weights are loaded and verified: it remembers their sums, and in time, on the
    device, about 200 bytes a channel of each layer and call and a copy of the text's keys, in
    float32. While a chunk is watched it keeps what passes of one block, or of as many as leave no
    more than 64 MiB; computing it again takes a few tensors of that more, in float32. Sums of the
    rows that attention saw are kept until the chunk ends: 16 bytes a head of each row in view.
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
        self._kept: list[BlockRecord] = []
        self._num_kept_bytes = 0
        self._waiting: list[tuple[list[BlockRecord], TokenSums]] = []
        self._num_waiting_bytes = 0
        self._fault = ""
        """Of the first block that did not compute what every block does."""
        self._compared: list[Compared] = []
        self._sums: tuple[ReducedSum, ...] = ()
        self._blocks = [each for each in generator.model.blocks if isinstance(each, Block)]
        self._weights = BlockWeights(self._blocks)
        self._turns, self._num_rebuilt = CallTurns(self._every), 0
        self.masses: Mapping[int, Estimate] = {}
        """What the last chunk attended to by frame, by layer, where its last call was watched and
        the cache asks."""

    def begin(
        self, envelope: PPEnvelope, tensors: Mapping[str, Tensor], plans: Sequence[CallPlan]
    ) -> None:
        """Watch the blocks that are audited in this chunk, of whose calls `plans` has one each."""
        self.abandon()
        self._chunk = envelope.chunk_index
        self._calls = plans
        audits = self._audits(tensors[LATENTS_IN].shape[0])
        if audits:
            watched = {audit.layer: self._blocks[audit.layer] for audit in audits}
            self._recorder = BlockRecorder(
                self._generator, self._weights, watched, audits, self._calls, self._take
            )

    def _audits(self, batch: int) -> list[Audit]:
        """Those of the chunk that begins, in the order in which blocks are entered."""
        num_layers, num_calls = len(self._blocks), len(self._calls)
        if self._level is IntegrityLevel.STRICT:
            return whole_audits(num_layers, num_calls)
        first = int(self._calls[0].is_recompute)
        visit = self._chunk // self._every // (num_calls - first)
        audits: list[Audit] = []
        for call in self._turns.due(self._chunk, num_calls=num_calls, has_recompute=bool(first)):
            number, plan = visit + 31 * (call - first), self._calls[call]
            if call < first:
                number, self._num_rebuilt = self._num_rebuilt, self._num_rebuilt + 1
            audits += audits_in_turn(
                number, call=call, plan=plan, num_layers=num_layers, batch=batch
            )
        return audits

    def end(self) -> None:
        """Compute again what was watched; the cache must have advanced.

        Raises:
            IntegrityError: naming chunk, rank, call, layer, token and stage.
        """
        recorder = self._recorder
        if recorder is None:
            self.abandon()
            return
        self._compare()
        compared, fault, missed = self._compared, self._fault, recorder.missed()
        self.abandon()
        self.masses = recorder.masses
        if fault:
            raise IntegrityError(fault)
        for each in compared:
            judge(each, self._generator, self._checks, self._where)
        rows = self._rows()
        rows.check_past(recorder.first_shown.values(), self._where)
        for each in compared:
            for record, changed in zip(each.records, each.past_rows_changed.tolist(), strict=True):
                rows.check_count(self._where(record.audit), changed)
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
        sums = [sums for each in compared for sums in each.sums]
        self._sums = tuple(one for each in sums for one in each.on_host())

    def abandon(self) -> None:
        """Watch nothing any more, as after a chunk that failed."""
        if self._recorder is not None:
            self._recorder.stop()
        self._recorder, self._compared, self._sums, self._fault = None, [], (), ""
        self.masses = {}
        self._kept, self._num_kept_bytes = [], 0
        self._waiting, self._num_waiting_bytes = [], 0

    @property
    def suspect_from(self) -> int:
        """The first chunk since the same call was looked at: turns follow from its index, so that
        an earlier process had them too."""
        if self._level is IntegrityLevel.STRICT:
            return self._chunk
        return self._chunk + 1 - len(self._calls) * self._every

    def report(self) -> tuple[ReducedSum, ...]:
        """The last chunk's all-reduces, for `Checks.reduced_sums`; empty in a group of one."""
        return self._sums

    @torch.inference_mode()
    def _take(self, record: BlockRecord) -> None:
        """A block that is watched has ended; waits for no device."""
        if record.fault:
            where = self._where(record.audit)
            self._fault = self._fault or f"{where}: the block computed {record.fault}"
            return
        if self._kept and not _follows(record.audit, self._kept[-1].audit):
            self._sum_up()
        self._kept.append(record)
        self._num_kept_bytes += record.num_bytes
        if self._num_kept_bytes > _MOST_KEPT_BYTES:
            self._sum_up()
        if self._num_waiting_bytes > _MOST_WAITING_BYTES:
            self._compare()

    def _sum_up(self) -> None:
        """Take sums of what is kept, and let go of it."""
        if not self._kept:
            return
        kept, self._kept, self._num_kept_bytes = self._kept, [], 0
        made, text = self._generator.modulations, text_of(self._generator, kept[0])
        sums = token_sums(kept, self._weights, made, text)
        for record in kept:
            record.forget()
        self._waiting.append((kept, sums))
        self._num_waiting_bytes += sums.text_scores_RBHLN.nbytes

    @torch.inference_mode()
    def _compare(self) -> None:
        """Compare what waits with what it must be, and let go of what is large; waits for no
        device."""
        self._sum_up()
        made = self._generator.modulations
        for _, each in groupby(self._waiting, key=lambda waiting: _alike(waiting[0][0])):
            found, sums = zip(*each, strict=True)
            records = [record for some in found for record in some]
            text = text_of(self._generator, records[0])
            seen = BlockSums(self._weights, records, sums, made, text)
            stages = list(BlockAudit(seen, self._rounding).stages())
            got, want, bound = (
                torch.cat([stage.whole(name) for stage in stages], dim=1)
                for name in ("got", "want", "bound")
            )
            is_right = ((got - want).abs_() <= bound).all()
            changed = self._rows().changed(records)
            reduced = reduced_sums_of(seen, self._rounding, self._generator.model.group.size)
            self._compared.append(Compared(records, stages, is_right, changed, reduced))
            for record in records:
                record.attended = None
        self._waiting, self._num_waiting_bytes = [], 0

    def _rows(self) -> ShownRows:
        return ShownRows(self._generator, self._weights, self._rounding, self._checks)

    def _where(self, audit: Audit, token: int | None = None) -> str:
        where = f"chunk {self._chunk}, rank {self._rank}, call {audit.call}, layer {audit.layer}"
        token = audit.token if token is None else token
        return where if token is None else f"{where}, token {token}"


def _follows(audit: Audit, before: Audit) -> bool:
    return audit.call == before.call and audit.layer == before.layer + 1


def _alike(record: BlockRecord) -> tuple[object, ...]:
    """Records of as many tokens, or one token, are computed again together."""
    return (id(record.window), record.plan.num_tokens, record.audit.batch, record.audit.token)
