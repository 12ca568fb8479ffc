"""Attention saw the rows that lie in the cache, and the cache keeps those that blocks gave."""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from scope_rt.checks import Checks
from scope_rt.integrity.audit_plan import Audit, CallPlan
from scope_rt.integrity.block_record import BlockRecord, GivenRows
from scope_rt.integrity.cached_rows import largest_loss
from scope_rt.integrity.call_weights import BlockWeights
from scope_rt.integrity.linear_sums import to_array
from scope_rt.integrity.oracle_attention import Attended, Rows, of_batch, row_sums
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

    def changed(self, records: Sequence[BlockRecord]) -> Tensor:
        """How many sums of past rows are not those of the first call that was shown them: `[R]`, of
        records of one window. Waits for no device.

        Rows are told by their sums, which are bits of the same products of the same memory.
        """
        seen = [each.attended for each in records if each.attended is not None]
        want = [each.first.rows_BKHS for each in records if each.first is not None]
        return self._num_changed(seen, want, is_over=False)

    def check_past(self, first_shown: Iterable[Attended], where: Where) -> None:
        """What the first calls saw is in the cache, once the chunk is over."""
        for _, each in groupby(first_shown, key=lambda seen: id(seen.window)):
            seen = list(each)
            want = [self._cached(attended) for attended in seen]
            changed = self._num_changed(seen, want, is_over=True)
            for attended, number in zip(seen, changed.tolist(), strict=True):
                self.check_count(where(attended.audit), number)

    def check_count(self, where: str, num_changed: int) -> None:
        if num_changed:
            name = "past rows that attention saw changed"
            self._checks.cached_rows(where, name, num_changed, 0, 0)

    def _cached(self, seen: Attended) -> Rows:
        num_slots = seen.rows_BKHS[0].shape[1]
        rows = self._generator.cache.rows(seen.audit.layer, slice(0, num_slots))
        rows = of_batch(rows, seen.audit.batch, self._weights.dtype)
        return row_sums(rows, self._weights.head_signs_DK)

    def _num_changed(
        self, seen: Sequence[Attended], want: Sequence[Rows], *, is_over: bool
    ) -> Tensor:
        past = self._past_slots(seen[0].window, is_over=is_over)[:, None, None]
        past = past.to(self._weights.device)
        changed = [
            ((torch.stack(a) != torch.stack(b)) & past).flatten(1).sum(1)
            for a, b in zip(
                zip(*(each.rows_BKHS for each in seen), strict=True),
                zip(*want, strict=True),
                strict=True,
            )
        ]
        return changed[0] + changed[1]

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
        bound = largest_loss(torch.from_numpy(want), spec.codec, self._rounding.stored).numpy()
        off = np.abs(got - want)
        if (off <= bound).all():
            return
        at = np.unravel_index((off - bound).argmax(), off.shape)
        frame = first_frame + int(at[1]) // spec.frame_tokens
        self._checks.cached_rows(
            f"{where}, frame {frame}", name, float(got[at]), float(want[at]), float(bound[at])
        )
