"""Rows of a cache are, bit for bit and place for place, what was written to them.

A digest of every row is taken from what a chunk's last call gives, not from what lies in memory
afterwards, so that a write that was skipped or went elsewhere shows as well.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from scope_rt.bit_digest import Words, row_digests
from scope_rt.kv_cache.row_store import RowStore, Slots

Stored = Sequence[Sequence[Tensor]]
"""By plane and part: `[..., B, T, heads, width]`, whole frames of tokens."""
_MOST_PENDING_BYTES = 1 << 20
"""Small layers are digested one after another, with the code still in the CPU's caches: from a cold
one it takes longer than the numbers do."""


class RowLedger:
    """A digest of 8 bytes for every row `[L, B, S]`, on the rows' device."""

    def __init__(self, rows: RowStore, *, frame_tokens: int) -> None:
        self._rows, self._frame_tokens = rows, frame_tokens
        widths = [part.shape[-2] * part.shape[-1] for plane in rows.parts for part in plane]
        self._first_columns = [0, *accumulate(widths)][:-1]
        self._digests_LBS = self._rows_of(rows.parts)
        self._pending: list[tuple[int, slice, Stored]] = []
        self._num_pending = 0
        slot_bytes = rows.num_bytes // (rows.num_layers * rows.num_slots)
        self._most_pending = _MOST_PENDING_BYTES // slot_bytes

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
        for layer, slots, stored in self._pending:
            self._digests_LBS[layer, :, slots] = self._rows_of(stored)
        self._pending, self._num_pending = [], 0

    def damaged(self, layers: range, frame_slots: range, place: Slots) -> Sequence[tuple[int, int]]:
        """Layers and frame slots that hold something else than was written.

        `place` is where the tokens of `frame_slots` lie. Reads them; blocks until that is done.
        """
        self._flush()
        at, size = slice(layers.start, layers.stop), self._frame_tokens
        slots = slice(frame_slots.start * size, frame_slots.stop * size)
        held = [[part[at][:, :, place] for part in plane] for plane in self._rows.parts]
        differs_LBT = self._rows_of(held) != self._digests_LBS[at, :, slots]
        if not differs_LBT.any():
            return []
        found = torch.as_tensor(differs_LBT).any(1).unflatten(-1, (-1, size)).any(-1)
        return [(layers[layer], frame_slots[frame]) for layer, frame in found.nonzero().tolist()]

    def _rows_of(self, stored: Stored) -> Words:
        """The digest of every row over all its parts, `[..., B, T]`."""
        parts = [part.flatten(-2) for plane in stored for part in plane]
        digests = map(row_digests, parts, self._first_columns)
        return sum(digests, start=next(digests))
