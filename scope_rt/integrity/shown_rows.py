"""Attention saw the rows that lie in the cache, and the cache keeps those that blocks gave."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from scope_rt.checks import Checks
from scope_rt.integrity.audit_plan import Audit, CallPlan
from scope_rt.integrity.block_record import BlockRecord, GivenRows
from scope_rt.integrity.cached_rows import largest_loss
from scope_rt.integrity.call_weights import BlockWeights
from scope_rt.integrity.linear_sums import to_array
from scope_rt.integrity.oracle_attention import of_batch, row_sums
from scope_rt.integrity.tolerance import Array, Rounding
from scope_rt.kv_cache.frame_cache import WriteWindow
from scope_rt.models.generator import ChunkGenerator

Where = Callable[[Audit], str]
"""Names chunk, rank, call and layer."""


class ShownRows:
    """Of one rank; asked once a chunk is over and the cache has advanced.

    All raise what `Checks.cached_rows` does.
    """

    def __init__(
        self, generator: ChunkGenerator, weights: BlockWeights, rounding: Rounding, checks: Checks
    ) -> None:
        self._generator, self._weights = generator, weights
        self._rounding, self._checks = rounding, checks

    def check_past(self, records: Sequence[BlockRecord], where: Where) -> None:
        """Past rows are those of the call before, and of the cache once the chunk is over.

        They are told by their sums, which are bits of the same products of the same memory.
        """
        first: dict[tuple[int, int], BlockRecord] = {}
        for record in records:
            if record.attended is None or record.window is None:
                continue
            before = first.setdefault((record.audit.layer, id(record.window)), record)
            rows = record.attended.rows_BKHS
            assert before.attended is not None
            if before is record:
                layer, num_slots = record.audit.layer, rows[0].shape[1]
                held = self._generator.cache.rows(layer, slice(0, num_slots))
                want = row_sums(
                    of_batch(held, record.audit.batch, self._weights.dtype),
                    self._weights.head_signs_DK,
                )
            else:
                want = before.attended.rows_BKHS
            self._check_same(
                where(record.audit), record.window, rows, want, is_over=before is record
            )

    def _check_same(
        self,
        where: str,
        window: WriteWindow,
        rows: tuple[Tensor, Tensor],
        want: tuple[Tensor, Tensor],
        *,
        is_over: bool,
    ) -> None:
        if all(torch.equal(a, b) for a, b in zip(rows, want, strict=True)):
            return
        past = self._past_slots(window, is_over=is_over).to(rows[0].device)[None, :, None, None]
        changed = sum(int(((a != b) & past).sum()) for a, b in zip(rows, want, strict=True))
        if changed:
            name = "past rows that attention saw changed"
            self._checks.cached_rows(where, name, changed, 0, 0)

    def _past_slots(self, window: WriteWindow, *, is_over: bool) -> Tensor:
        """Token slots of other chunks; once this one is over, those that still hold the same."""
        cache, frames = self._generator.cache, window.frames_in_view
        held = [cache.frames_by_slot.get(slot) for slot in range(len(frames))]
        is_held = [not is_over or now == frame for now, frame in zip(held, frames, strict=True)]
        past = torch.tensor(is_held).repeat_interleave(cache.spec.frame_tokens)
        for segment in window.segments:
            past[segment.slots] = False
        return past

    def check_kept(self, given: GivenRows, call: CallPlan, where: str) -> None:
        """The chunk's rows as they lie in the cache, against those of its last call."""
        cache, layer = self._generator.cache, given.audit.layer
        for segment in given.window.segments:
            first = call.first_frame + segment.source // cache.spec.frame_tokens
            kept = cache.rows(layer, segment.slots)
            for name, as_kept, rows in zip(
                ("keys", "values"), kept, (given.k, given.v), strict=True
            ):
                as_given = rows[:, segment.sources]
                if not torch.equal(as_kept, as_given):
                    self._check_loss(where, name, to_array(as_kept), to_array(as_given), first)

    def _check_loss(self, where: str, name: str, got: Array, want: Array, first_frame: int) -> None:
        spec = self._generator.cache.spec
        bound = largest_loss(want, spec.codec, self._rounding.stored)
        off = np.abs(got - want)
        if (off <= bound).all():
            return
        at = np.unravel_index((off - bound).argmax(), off.shape)
        frame = first_frame + int(at[1]) // spec.frame_tokens
        self._checks.cached_rows(
            f"{where}, frame {frame}", name, float(got[at]), float(want[at]), float(bound[at])
        )
