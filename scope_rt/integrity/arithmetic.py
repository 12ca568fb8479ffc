"""A chunk that was computed wrong is refused, whichever kernel, flag, position or row was wrong.

In each chunk one token of one layer and call in turn (all of them, one token each, where the level
is strict) is computed again in float64, from the block's input to its output, and held against what
the kernels gave and the cache kept. What all-reduces gave and got is summed for the comparison of
ranks. Blocks that are not audited run as if there were no audit.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from scope_contracts.arithmetic import Deviation, ReducedSum
from scope_contracts.envelope import CONTEXT_FRAMES_OVERRIDE, LATENTS_IN, PPEnvelope
from scope_contracts.errors import IntegrityError
from scope_contracts.integrity import IntegrityLevel
from scope_rt.checks import Checks
from scope_rt.integrity.audit_plan import Audit, CallPlan, RecomputeTurns, audits_of, calls_of
from scope_rt.integrity.cached_rows import largest_loss
from scope_rt.integrity.linear_sums import to_array
from scope_rt.integrity.oracle import BlockOracle, Stage
from scope_rt.integrity.recorder import BlockRecord, BlockRecorder
from scope_rt.integrity.tolerance import Rounding
from scope_rt.models.causal_wan import Block
from scope_rt.models.generator import ChunkGenerator

_REDUCED = (
    "sums of squares of q and k",
    "self-attention",
    "sum of squares of the text's q",
    "text attention",
    "feed-forward",
)


class ArithmeticCheck:
    """One generator rank's audit: `begin` before a chunk, `end` after it, then `report`.

    In `default` every (layer, call) has its turn within layers x calls x `every` chunks, and a
    recompute whenever it happens. Build it when the weights are loaded and verified: it remembers
    their sums, 40 bytes a row and a column.
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
        self._origin_frame = self._chunk = 0
        self._calls: list[CallPlan] = []
        self._recorders: list[tuple[list[Audit], BlockRecorder]] = []
        self._sums: tuple[ReducedSum, ...] = ()
        self._blocks: list[Block] = []
        self._oracles: list[BlockOracle] = []
        if level is not IntegrityLevel.OFF:
            self._blocks = [each for each in generator.model.blocks if isinstance(each, Block)]
            self._oracles = [BlockOracle(block, self._rounding) for block in self._blocks]
        self._recomputes = RecomputeTurns(num_layers=len(self._blocks), every=self._every)

    def begin(self, envelope: PPEnvelope, tensors: Mapping[str, Tensor]) -> None:
        """Watch the blocks that are audited in this chunk."""
        self.abandon()
        if self._level is IntegrityLevel.OFF:
            return
        self._chunk, latents = envelope.chunk_index, tensors[LATENTS_IN]
        num_context = 0
        if envelope.reset_kv_cache:
            self._origin_frame = 0
        if envelope.do_kv_recompute:
            num_context = tensors[CONTEXT_FRAMES_OVERRIDE].shape[1]
            self._origin_frame = envelope.current_start_frame - num_context
        self._calls = calls_of(
            envelope,
            origin_frame=self._origin_frame,
            grid=(latents.shape[3] // 2, latents.shape[4] // 2),
            num_frames=latents.shape[1],
            num_context=num_context,
        )
        audits = self._audits(latents.shape[0])
        for layer, each in groupby(audits, key=lambda audit: audit.layer):
            of_layer = list(each)
            recorder = BlockRecorder(self._blocks[layer], of_layer, self._calls)
            self._recorders.append((of_layer, recorder))

    def _audits(self, batch: int) -> list[Audit]:
        """Those of the chunk that begins, by layer."""
        audits: list[Audit] = []
        is_strict = self._level is IntegrityLevel.STRICT
        if not self._chunk % self._every:
            audits += audits_of(
                self._chunk // self._every,
                num_layers=len(self._blocks),
                calls=self._calls,
                batch=batch,
                is_strict=is_strict,
            )
        if self._calls[0].block_frames and not is_strict:
            audits += self._recomputes.audits(self._chunk, self._calls[0], batch=batch)
        return sorted(audits, key=lambda audit: (audit.layer, audit.call))

    def end(self) -> None:
        """Compute again what was watched; the cache must have advanced.

        Raises:
            IntegrityError: naming chunk, rank, call, layer, token and stage.
        """
        watched, sums = list(self._recorders), []
        self.abandon()
        for audits, recorder in watched:
            records = recorder.records
            if [record.audit for record in records] != audits:
                where = self._where(audits[len(records)])
                raise IntegrityError(f"{where}: the block was not entered")
            sums += [each for record in records for each in self._sums_of(record)]
            self._check_rows(records)
            stages = self._oracles[audits[0].layer].stages(records)
            self._check_stages(audits, list(stages))
        self._sums = tuple(sums)

    def abandon(self) -> None:
        """Watch nothing any more, as after a chunk that failed."""
        for _, recorder in self._recorders:
            recorder.stop()
        self._recorders, self._sums = [], ()

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

    def _where(self, audit: Audit) -> str:
        return (
            f"chunk {self._chunk}, rank {self._rank}, call {audit.call}, layer {audit.layer}, "
            f"token {audit.token}"
        )

    def _sums_of(self, record: BlockRecord) -> list[ReducedSum]:
        audit = record.audit
        names = (f"call {audit.call}, layer {audit.layer}, {name}" for name in _REDUCED)
        return [pair.on_host(name) for name, pair in zip(names, record.pairs, strict=False)]

    def _check_stages(self, audits: Sequence[Audit], stages: Sequence[Stage]) -> None:
        """The first stage that is off is where the fault is."""
        got = np.concatenate([stage.got for stage in stages], axis=-1)
        off = np.abs(got - np.concatenate([stage.want for stage in stages], axis=-1))
        if (off <= np.concatenate([stage.bound for stage in stages], axis=-1)).all():
            return
        for stage in stages:
            off = np.abs(stage.got - stage.want)
            if (off <= stage.bound).all():
                continue
            shape, bound = off.shape, stage.bound
            record, column = map(int, np.unravel_index((off - bound).argmax(), shape))
            check = self._checks.arithmetic
            if stage.is_linear:
                check = self._checks.linear_sums
            check(
                Deviation(
                    where=self._where(audits[record]),
                    stage=stage.name,
                    got=float(stage.got[record, column]),
                    want=float(stage.want[record, column]),
                    bound=float(bound[record, column]),
                )
            )

    def _check_rows(self, records: Sequence[BlockRecord]) -> None:
        for record in records:
            changed = sum(map(bool, record.changed_rows))
            if changed:
                where = self._where(record.audit)
                self._checks.cached_rows(where, "rows that attention saw changed", changed, 0, 0)
        last = records[-1]
        if last.audit.call + 1 == len(self._calls):
            self._check_kept(last)

    def _check_kept(self, record: BlockRecord) -> None:
        """The chunk's rows as they lie in the cache, against those of its last call."""
        cache, plan = self._generator.cache, record.plan
        kept, tokens = cache.frames_kept, plan.rows * plan.columns
        assert record.given is not None
        for name, rows, given in zip(
            ("keys", "values"), cache.cached(record.audit.layer), record.given, strict=True
        ):
            for number in range(plan.num_frames):
                frame = plan.first_frame + number
                if frame not in kept:
                    continue
                slot = kept.index(frame) * tokens
                as_kept = rows[:, slot : slot + tokens]
                as_given = given[:, number * tokens : (number + 1) * tokens]
                if torch.equal(as_kept, as_given):
                    continue
                got, want = to_array(as_kept), to_array(as_given)
                bound = largest_loss(want, cache.spec.codec, self._rounding.stored)
                off = np.abs(got - want)
                if (off <= bound).all():
                    continue
                at = np.unravel_index((off - bound).argmax(), off.shape)
                self._checks.cached_rows(
                    f"{self._where(record.audit)}, frame {frame}",
                    name,
                    float(got[at]),
                    float(want[at]),
                    float(bound[at]),
                )
