"""Rows of a cache are, bit for bit and place for place, what was written to them.

A digest of every frame of every layer is taken from what a chunk's last call gives, not from what
lies in memory afterwards, so that a write that was skipped or went elsewhere shows as well.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from scope_rt.bit_digest import position_weights, row_digests
from scope_rt.kv_cache.row_store import RowStore, Slots

Stored = Sequence[Sequence[Tensor]]
"""By plane and part: `[..., B, T, heads, width]`, whole frames of tokens."""
_MOST_PENDING_BYTES = 1 << 20
"""Small layers are digested together, since each step costs more than their numbers do."""


class RowLedger:
    """Digests by layer and frame slot, on the rows' device."""

    def __init__(self, rows: RowStore, *, frame_tokens: int) -> None:
        self._rows, self._frame_tokens = rows, frame_tokens
        shape = (rows.num_layers, rows.num_slots // frame_tokens)
        self._digests_LF = torch.zeros(shape, dtype=torch.int64, device=rows.device)
        num_parts = sum(map(len, rows.parts))
        weights = position_weights(num_parts * rows.batch * frame_tokens, device=rows.device)
        self._weights_PBT = weights.view(num_parts, rows.batch, frame_tokens)
        self._pending: list[tuple[int, slice, list[Tensor]]] = []
        self._pending_bytes = 0

    def note(self, layer: int, slots: slice, stored: Stored) -> None:
        """`stored` was given to be written at token `slots`, and will not be changed.

        Blocks nothing on another device.
        """
        parts = [part for plane in stored for part in plane]
        self._pending.append((layer, slots, parts))
        self._pending_bytes += sum(part.nbytes for part in parts)
        if self._pending_bytes > _MOST_PENDING_BYTES:
            self.flush()

    def flush(self) -> None:
        """Let go of what was noted; its digests stay."""
        if not self._pending:
            return
        size = self._frame_tokens
        places = [
            (layer, slot // size)
            for layer, slots, _ in self._pending
            for slot in range(slots.start, slots.stop, size)
        ]
        by_part = zip(*(parts for _, _, parts in self._pending), strict=True)
        rows_PBT = _rows_of([torch.cat(parts, dim=1) for parts in by_part])
        at_LF = torch.tensor(places, device=rows_PBT.device)
        self._digests_LF[at_LF[:, 0], at_LF[:, 1]] = self._frames_of(rows_PBT)
        self._pending, self._pending_bytes = [], 0

    def damaged(self, layers: range, frame_slots: range, place: Slots) -> Sequence[tuple[int, int]]:
        """Layers and frame slots that hold something else than was written.

        `place` is where the tokens of `frame_slots` lie. Reads them; blocks until that is done.
        """
        self.flush()
        at, frames = slice(layers.start, layers.stop), slice(frame_slots.start, frame_slots.stop)
        parts = [part[at][:, :, place] for plane in self._rows.parts for part in plane]
        rows_PLBT = _rows_of(parts)
        differs_LF = self._frames_of(rows_PLBT.movedim(0, 1)) != self._digests_LF[at, frames]
        if not differs_LF.any():
            return []
        found = differs_LF.nonzero().tolist()
        return [(layers[layer], frame_slots[frame]) for layer, frame in found]

    def _frames_of(self, rows_PBT: Tensor) -> Tensor:
        """One digest a frame, `[..., F]`, over all parts and batch rows: `[..., P, B, T]`."""
        rows = rows_PBT.unflatten(-1, (-1, self._frame_tokens))
        weighted: Tensor = rows * self._weights_PBT[:, :, None]
        return weighted.sum((-4, -3, -1))


def _rows_of(parts: Sequence[Tensor]) -> Tensor:
    """The digest of every row of every part: `[parts, ..., B, T]`."""
    return torch.stack([row_digests(part.flatten(-2)) for part in parts])
