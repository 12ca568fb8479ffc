"""Rows lie where they were told to, in memory that is allocated once; nobody else touches a byte.

A store knows neither sequences nor frames. Storages (contiguous, ring, paged) decide which slot a
token has; codecs decide what a slot holds.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from scope_contracts.errors import CacheError
from scope_contracts.row_format import RowFormat
from scope_rt.kv_cache.codec import codec_for
from scope_rt.tensors import TORCH_DTYPES

Slots = slice | Tensor
"""Slots of one batch row: a slice (read without a copy), or int64 indices `[K]` (gathered)."""


class RowStore:
    """`[num_layers, batch, num_slots, heads, width]` for every part of every plane.

    `format` is this rank's share (`RowFormat.shard`).
    """

    def __init__(
        self,
        row_format: RowFormat,
        *,
        num_layers: int,
        batch: int,
        num_slots: int,
        device: torch.device,
    ) -> None:
        self.format = row_format
        self.num_layers, self.batch, self.num_slots = num_layers, batch, num_slots
        self.device = device
        self.dtype = TORCH_DTYPES[row_format.dtype]
        self._codec = codec_for(row_format.codec, device)
        self.parts: tuple[tuple[Tensor, ...], ...] = tuple(
            tuple(
                torch.zeros(
                    (num_layers, batch, num_slots, plane.heads, part.width),
                    dtype=part.dtype,
                    device=device,
                )
                for part in self._codec.parts(plane.dim, self.dtype)
            )
            for plane in row_format.planes
        )
        """Stored tensors, by plane and part."""

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for plane in self.parts for part in plane)

    def write(
        self,
        layer: int,
        slots: Slots,
        planes: Sequence[Tensor],
        *,
        batch: int | slice = slice(None),
    ) -> list[tuple[Tensor, ...]]:
        """Store all planes, each `[B, T, heads, dim]` (`[T, heads, dim]` for one batch row).

        Returns what each plane's parts were given, as it is stored.

        Raises:
            CacheError: a plane is missing or has another shape than the slots; nothing was written.
        """
        if len(planes) != len(self.parts):
            raise CacheError(f"got {len(planes)} planes, the cache has {len(self.parts)}")
        batches = () if isinstance(batch, int) else (len(range(*batch.indices(self.batch))),)
        for plane, spec in zip(planes, self.format.planes, strict=True):
            want = (*batches, self._count(slots), spec.heads, spec.dim)
            if plane.shape != want:
                raise CacheError(f"got {spec.name} {tuple(plane.shape)}, want {want}")
        encoded = [self._codec.encode(plane) for plane in planes]
        targets = [[part[layer, batch] for part in plane] for plane in self.parts]
        at = (slice(None), slots) if batches else (slots,)
        for parts, sources in zip(targets, encoded, strict=True):
            for target, source in zip(parts, sources, strict=True):
                target[at] = source
        return encoded

    def read(
        self, layer: int, slots: Slots, *, batch: int | slice = slice(None)
    ) -> tuple[Tensor, ...]:
        """Every plane at `slots`, `[B, K, heads, dim]` (`[K, heads, dim]` for one batch row)."""
        at = slots if isinstance(batch, int) else (slice(None), slots)
        return tuple(
            self._codec.decode([part[layer, batch][at] for part in plane], self.dtype)
            for plane in self.parts
        )

    def copy(self, layer: int, *, source: Slots, target: Slots, batch: int) -> None:
        """Move what lies at `source` to `target` of the same batch row, without decoding it."""
        for plane in self.parts:
            for part in plane:
                rows = part[layer, batch]
                rows[target] = rows[source].clone()

    def _count(self, slots: Slots) -> int:
        if isinstance(slots, Tensor):
            return slots.numel()
        return len(range(*slots.indices(self.num_slots)))
