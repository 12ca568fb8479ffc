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
        self._pending.append((layer, slots, [part for plane in stored for part in plane]))
        self._pending_bytes += sum(part.nbytes for part in self._pending[-1][2])
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
        digests = self._digests_of([torch.cat(parts, dim=1) for parts in by_part])
        at_LF = torch.tensor(places, device=digests.device)
        self._digests_LF[at_LF[:, 0], at_LF[:, 1]] = digests
        self._pending, self._pending_bytes = [], 0

    def damaged(self, layers: range, frame_slots: range, place: Slots) -> Sequence[tuple[int, int]]:
        """Layers and frame slots that hold something else than was written.

        `place` is where the tokens of `frame_slots` lie. Reads them; blocks until that is done.
        """
        self.flush()
        at, frames = slice(layers.start, layers.stop), slice(frame_slots.start, frame_slots.stop)
        parts = [part[at][:, :, place] for plane in self._rows.parts for part in plane]
        differs_LF = self._digests_of(parts) != self._digests_LF[at, frames]
        if not differs_LF.any():
            return []
        found = differs_LF.nonzero().tolist()
        return [(layers[layer], frame_slots[frame]) for layer, frame in found]

    def _digests_of(self, parts: Sequence[Tensor]) -> Tensor:
        """One digest a frame, `[..., F]`, over all parts `[..., B, T, heads, width]`."""
        total = torch.zeros((), dtype=torch.int64, device=self._weights_PBT.device)
        for part, weights_BT in zip(parts, self._weights_PBT, strict=True):
            *above, batch, tokens = part.shape[:-2]
            rows = row_digests(part.flatten(-2).flatten(0, -2))
            rows = rows.view(*above, batch, tokens // self._frame_tokens, self._frame_tokens)
            total = total + (rows * weights_BT[:, None]).sum((-3, -1))
        return total
