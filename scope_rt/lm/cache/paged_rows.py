"""Which slots hold a batch's rows follows from its block tables by host arithmetic alone.

Slot `block * block_size + i` holds row i of a block. A block table is a list of blocks in order of
position; None stands for one that left the window.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scope_rt.kv_cache.row_store import Slots
from scope_rt.lm.cache.prefix_cache import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """What a kernel with a block table takes, e.g. flash-attn's `flash_attn_with_kvcache`."""

    planes: tuple[Tensor, ...]
    """The pool itself, `[blocks, block_size, heads, dim]` a plane."""
    block_table: Tensor
    """int32 `[B, blocks]`; where a sequence has none, the zero block."""
    cache_seqlens: Tensor
    """int32 `[B]`: rows written, the open span included once the layer was appended."""


class VisibleRows:
    """The rows at positions below `visible[b]` in the blocks that sequence b still holds."""

    def __init__(
        self,
        tables: Sequence[Table],
        visible: Sequence[int],
        *,
        block_size: int,
        zero_block: int,
        device: torch.device,
    ) -> None:
        self._size, self._zero, self._device = block_size, zero_block, device
        firsts = [_first_held(table) for table in tables]
        self._starts = [first * block_size for first in firsts]
        self._blocks = [
            [block for block in table[first:] if block is not None]
            for table, first in zip(tables, firsts, strict=True)
        ]
        pairs = zip(visible, self._starts, strict=True)
        self.counts = tuple(max(0, end - start) for end, start in pairs)
        """Rows of every sequence."""
        self._slots: Slots | None = None
        self._positions: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Over all sequences."""
        return sum(self.counts)

    @property
    def positions(self) -> Tensor:
        """int64 `[B, K]`; -1 behind a sequence that is shorter than the longest."""
        if self._positions is None:
            positions_BK = self._row + self._column(self._starts)
            self._positions = positions_BK.where(self._real, -1)
        return self._positions

    @property
    def slots(self) -> Slots:
        """One piece where a single sequence lies in adjacent blocks; else `[B, K]`, and rows of
        the zero block behind a shorter sequence."""
        if self._slots is None:
            self._slots = self._piece() or self._scattered()
        return self._slots

    def _piece(self) -> slice | None:
        if len(self._blocks) != 1:
            return None
        (blocks,) = self._blocks
        first = blocks[0] if blocks else 0
        if blocks != list(range(first, first + len(blocks))):
            return None
        return slice(first * self._size, first * self._size + self.counts[0])

    def _scattered(self) -> Tensor:
        width = max(map(len, self._blocks))
        padded = [[*blocks, *[self._zero] * (width - len(blocks))] for blocks in self._blocks]
        firsts = torch.tensor(padded, dtype=torch.int64, device=self._device) * self._size
        offsets = torch.arange(self._size, device=self._device)
        slots_BK = (firsts[..., None] + offsets).flatten(1)[:, : max(self.counts)]
        return slots_BK.where(self._real, self._zero * self._size)

    @property
    def _row(self) -> Tensor:
        return torch.arange(max(self.counts), device=self._device)

    @property
    def _real(self) -> Tensor:
        return self._row < self._column(self.counts)

    def _column(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)[:, None]


def span_slots(
    tables: Sequence[Table],
    starts: Sequence[int],
    span: Sequence[int],
    *,
    block_size: int,
    device: torch.device,
) -> tuple[Tensor, Tensor | None]:
    """Slots of `span[b]` new rows from position `starts[b]` on, int64 `[N]`, sequence by sequence.

    And which rows of planes `[B, T]`, flattened, go there; None where all do.
    """
    slots: list[int] = []
    sources: list[int] = []
    longest = max(span)
    for index, (table, start, new) in enumerate(zip(tables, starts, span, strict=True)):
        sources += range(index * longest, index * longest + new)
        position, end = start, start + new
        while position < end:
            number, row = divmod(position, block_size)
            block = table[number]
            assert block is not None, "a span lies behind all that left the window"
            count = min(block_size - row, end - position)
            slots += range(block * block_size + row, block * block_size + row + count)
            position += count
    ragged = len(slots) != longest * len(span)
    as_tensor = torch.tensor(slots, dtype=torch.int64, device=device)
    return as_tensor, torch.tensor(sources, device=device) if ragged else None


def padded_table(tables: Sequence[Table], *, zero_block: int, device: torch.device) -> Tensor:
    """int32 `[B, blocks]`; the zero block where a table has nothing to show."""
    width = max(map(len, tables))
    padded = [
        [
            *(zero_block if block is None else block for block in table),
            *[zero_block] * (width - len(table)),
        ]
        for table in tables
    ]
    return torch.tensor(padded, dtype=torch.int32, device=device).reshape(len(tables), width)


def _first_held(table: Table) -> int:
    return next((i for i, block in enumerate(table) if block is not None), len(table))
