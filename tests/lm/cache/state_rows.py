"""A state that is the newest token's row, so what a state cache does can be read as rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from scope_contracts.errors import CacheError
from scope_contracts.row_format import RowFormat
from scope_rt.kv_cache.counters import CacheCounters
from scope_rt.lm.cache.state import StateCache
from scope_rt.lm.specs.state_format import StateFormat, StatePart


class NewestRow:
    """A `KVCache` over a `StateCache`, of which every layer shows one row."""

    def __init__(
        self,
        row_format: RowFormat,
        *,
        layers: Sequence[int],
        batch: int,
        device: torch.device,
    ) -> None:
        parts = tuple(
            StatePart(name=f"plane{number}", shape=(plane.heads, plane.dim))
            for number, plane in enumerate(row_format.planes)
        )
        state_format = StateFormat(parts=parts, dtype=row_format.dtype)
        self.format, self._batch = row_format, batch
        self.states = StateCache(state_format, layers=layers, batch=batch, device=device)
        self._open: dict[int, tuple[Tensor, ...]] = {}

    @property
    def counters(self) -> CacheCounters:
        return self.states.counters

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.states.lengths

    @property
    def num_bytes(self) -> int:
        return self.states.num_bytes

    def extend(self, num_tokens: Sequence[int]) -> None:
        self.states.extend(num_tokens)
        self._open = {}

    def append(self, layer: int, *planes: Tensor) -> None:
        span = self.states.span or (0,) * self._batch
        want = [(self._batch, max(span), plane.heads, plane.dim) for plane in self.format.planes]
        if [tuple(plane.shape) for plane in planes] != want:
            raise CacheError(f"got rows of other shapes than {want}")
        old = self.states.state(layer)
        behind = [torch.cat([o[:, None], n], dim=1) for o, n in zip(old, planes, strict=True)]
        newest = tuple(rows[torch.arange(self._batch), torch.tensor(span)] for rows in behind)
        moved = torch.tensor(span)[:, None, None] > 0  # what the others are given must not count
        self.states.update(layer, *(row * moved for row in newest))
        self._open[layer] = newest

    def view(self, layer: int) -> tuple[Tensor, ...]:
        shown = self._open[layer] if layer in self._open else self.states.state(layer)
        return tuple(part[:, None] for part in shown)

    def positions(self, layer: int) -> Tensor:
        new = self.states.span if layer in self._open else None
        ends = torch.tensor([self.lengths, new or (0,) * self._batch]).sum(0)
        return (ends - 1)[:, None]

    def advance(self) -> None:
        self.states.advance()
        self._open = {}

    def keep(self, layer: int, rows_BK: Tensor) -> None:
        self.states.keep(layer, rows_BK)

    def truncate(self, lengths: Sequence[int]) -> None:
        self.states.truncate(lengths)

    def fork(self) -> None:
        self.states.fork()

    def commit(self) -> None:
        self.states.commit()

    def discard(self) -> None:
        self.states.discard()
        self._open = {}

    def reset(self) -> None:
        self.states.reset()
        self._open = {}

    def digest(self) -> str:
        return self.states.digest()
