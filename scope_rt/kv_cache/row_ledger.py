"""Rows of a cache are, bit for bit and place for place, what was written to them.

A digest of every frame is taken from what a chunk's last call gives, not from what lies in memory
afterwards, so that a write that was skipped or went elsewhere shows as well.
"""

from collections.abc import Sequence
from functools import reduce
from itertools import chain
from operator import or_

import torch
from torch import Tensor

from scope_rt.kv_cache.row_store import RowStore, Slots
from scope_rt.memory_digest import frame_digests

Stored = Sequence[Sequence[Tensor]]
"""By plane and part: `[B, T, heads, width]`, whole frames of tokens."""


_MOST_PENDING_BYTES = 1 << 20
"""Small layers are digested one after another, with the code still in the CPU's caches: from a cold
one it takes longer than the numbers do."""


class RowLedger:
    """A digest of 8 bytes for every frame of every part, `[L, B, F]`, on the rows' device."""

    def __init__(self, rows: RowStore, *, frame_tokens: int) -> None:
        self._rows, self._frame_tokens = rows, frame_tokens
        self._digests_LBF = [frame_digests(part, frame_tokens) for part in chain(*rows.parts)]
        self._pending: list[tuple[int, slice, Stored]] = []
        slot_bytes = rows.num_bytes // (rows.num_layers * rows.num_slots)
        self._most_pending, self._num_pending = _MOST_PENDING_BYTES // slot_bytes, 0

    def note(self, layer: int, slots: slice, stored: Stored) -> None:
        """`stored` was given to be written at token `slots`, and will not be changed.

        Blocks nothing on another device.
        """
        self._pending.append((layer, slots, stored))
        self._num_pending += slots.stop - slots.start
        if self._num_pending > self._most_pending:
            self._flush()

    def _flush(self) -> None:
        """Let go of what was noted; its digests stay."""
        size = self._frame_tokens
        for layer, slots, stored in self._pending:
            frames = slice(slots.start // size, slots.stop // size)
            for noted_LBF, given in zip(self._digests_LBF, chain(*stored), strict=True):
                noted_LBF[layer, :, frames] = frame_digests(given, size)
        self._pending, self._num_pending = [], 0

    def damaged(self, layers: range, frame_slots: range, place: Slots) -> Sequence[tuple[int, int]]:
        """Layers and frame slots that hold something else than was written.

        `place` is where the tokens of `frame_slots` lie. Reads them; blocks until that is done.
        """
        self._flush()
        at = slice(layers.start, layers.stop)
        frames = slice(frame_slots.start, frame_slots.stop)
        differs = (
            frame_digests(part[at, :, place], self._frame_tokens) != noted_LBF[at, :, frames]
            for noted_LBF, part in zip(self._digests_LBF, chain(*self._rows.parts), strict=True)
        )
        differs_LBF = reduce(or_, differs)
        if not differs_LBF.any():
            return []
        found_LF = torch.as_tensor(differs_LBF).any(1)
        return [(layers[layer], frame_slots[frame]) for layer, frame in found_LF.nonzero().tolist()]
