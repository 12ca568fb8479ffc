"""Rows of a cache are, bit for bit and place for place, what was written to them.

A digest of every frame is taken from what a chunk's last call gives, not from what lies in memory
afterwards, so that a write that was skipped or went elsewhere shows as well.
"""

from collections.abc import Sequence
from itertools import chain

from torch import Tensor

from scope_rt.kv_cache.frame_digests import frame_digests_of
from scope_rt.kv_cache.row_store import RowStore, Slots

Stored = Sequence[Sequence[Tensor]]
"""By plane and part: `[B, T, heads, width]`, whole frames of tokens."""
_MOST_PENDING_BYTES = 1 << 20
"""Small layers are digested one after another, with the code still in the CPU's caches: from a cold
one it takes longer than the numbers do."""


class RowLedger:
    """A digest of 8 bytes for every frame of every part."""

    def __init__(self, rows: RowStore, *, frame_tokens: int) -> None:
        self._rows, self._frame_tokens = rows, frame_tokens
        self._digests = [frame_digests_of(part, frame_tokens) for part in chain(*rows.parts)]
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
        writes = [
            (layer, range(slots.start // size, slots.stop // size), [*chain(*stored)])
            for layer, slots, stored in self._pending
        ]
        for part, digests in enumerate(self._digests):
            digests.note([(layer, frames, given[part]) for layer, frames, given in writes])
        self._pending, self._num_pending = [], 0

    def damaged(self, layers: range, frame_slots: range, place: Slots) -> Sequence[tuple[int, int]]:
        """Layers and frame slots that hold something else than was written.

        `place` is where the tokens of `frame_slots` lie. Reads them; blocks until that is done.
        """
        self._flush()
        found: set[tuple[int, int]] = set()
        for digests, part in zip(self._digests, chain(*self._rows.parts), strict=True):
            found.update(digests.differing(part, layers, frame_slots, place))
        return sorted(found)
