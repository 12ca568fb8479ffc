"""Every level has its own rows, and the number of leaves says which of them are real.

A row lies at the index of its node, so truncating to n leaves keeps `n // group**level` rows of
every level and moves none. No row has a dirty flag: whatever depends on an edited leaf comes after
it in time, its summaries included, so the common prefix alone tells what is valid.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from scope_contracts.errors import CacheError, UnsupportedError
from scope_contracts.row_format import RowFormat
from scope_rt.kv_cache.counters import CacheCounters
from scope_rt.kv_cache.row_digest import row_digest
from scope_rt.kv_cache.row_store import RowStore
from scope_rt.kv_cache.span import SpanState
from scope_rt.lm.hierarchical.hierarchy import Hierarchy, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRows:
    """The rows of a span in all layers and levels, as they were stored."""

    span: Span
    parts: tuple[tuple[Tensor, ...], ...]
    """By level, then plane and part: `[layers, 1, nodes, heads, width]`."""

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for level in self.parts for part in level)


@dataclass(slots=True, kw_only=True)
class _Fork:
    """What a discard must bring back."""

    num_leaves: int
    low: int
    """Leaves that were never truncated since."""
    saved: list[SavedRows] = field(default_factory=list)


class HierarchicalCache:
    """One sequence of up to `max_leaves` leaves, with all levels of `hierarchy` above them.

    `extend` counts leaves. `append` and `view` take and show rows level by level: the span's leaves
    (the visible ones), then those of LOD1, and so on; `hierarchy.mask` tells which row sees which.
    `row_format` is this rank's share.
    """

    def __init__(
        self,
        row_format: RowFormat,
        hierarchy: Hierarchy,
        *,
        num_layers: int,
        max_leaves: int,
        device: torch.device,
    ) -> None:
        self.hierarchy, self.num_layers, self.max_leaves = hierarchy, num_layers, max_leaves
        self.device = device
        self.levels = tuple(
            RowStore(row_format, num_layers=num_layers, batch=1, num_slots=slots, device=device)
            for slots in hierarchy.counts(max_leaves)
        )
        """One store a level; it is as long as the level can become."""
        self.counters = CacheCounters()
        self.num_leaves = 0
        self._spans: SpanState[Span, _Fork] = SpanState()
        self._written = self._spans.written

    @property
    def format(self) -> RowFormat:
        return self.levels[0].format

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.num_leaves,)

    @property
    def num_bytes(self) -> int:
        """Bytes of all levels; rows saved for a discard come on top."""
        return sum(level.num_bytes for level in self.levels)

    @property
    def span(self) -> Span:
        """The open span; behind the last leaf and empty when none is open."""
        return self._spans.span or Span(start=self.num_leaves, end=self.num_leaves)

    def extend(self, num_tokens: Sequence[int]) -> None:
        if len(num_tokens) != 1 or num_tokens[0] < 0:
            raise CacheError(f"extend: got {tuple(num_tokens)}, want one count from 0 on")
        span = Span(start=self.num_leaves, end=self.num_leaves + num_tokens[0])
        if span.end > self.max_leaves:
            raise CacheError(
                f"{self.num_leaves} leaves and {num_tokens[0]} new ones do not fit "
                f"{self.max_leaves}; raise max_leaves, or collapse leaves"
            )
        self._spans.open(span)

    def append(self, layer: int, *planes: Tensor) -> None:
        nodes = self.hierarchy.nodes(self._spans.opened())
        counts = [len(level) for level in nodes]
        if len(planes) != len(self.format.planes):
            raise CacheError(f"got {len(planes)} planes, the cache has {len(self.format.planes)}")
        for plane in planes:
            if tuple(plane.shape[:2]) != (1, sum(counts)):
                raise CacheError(
                    f"got rows {tuple(plane.shape)}; the open span has {counts} nodes by level"
                )
        by_level = zip(*(plane.split(counts, dim=1) for plane in planes), strict=True)
        for store, level, rows in zip(self.levels, nodes, by_level, strict=True):
            if level:
                store.write(layer, slice(level.start, level.stop), rows)
        self._written.add(layer)
        self.counters.rows_written += sum(counts)

    def view(self, layer: int) -> tuple[Tensor, ...]:
        """As the interface says: every row that a leaf of the span, or else the next, may see."""
        keys = self._visible(layer)
        self.counters.rows_read += sum(map(len, keys))
        runs = [
            store.read(layer, slice(level.start, level.stop))
            for store, level in zip(self.levels, keys, strict=True)
            if level
        ]
        if len(runs) == 1:
            return runs[0]
        if not runs:
            return self.levels[0].read(layer, slice(0, 0))
        self.counters.gathers += 1
        return tuple(torch.cat(plane, dim=1) for plane in zip(*runs, strict=True))

    def positions(self, layer: int) -> Tensor:
        """The last leaf that every row of the view covers, int64 `[1, K]`."""
        return self._last_leaves(self._visible(layer))

    def advance(self) -> None:
        span = self._spans.opened()
        self._spans.check_written(range(self.num_layers) if span.num_leaves else ())
        self.num_leaves = span.end
        self.counters.advances += 1
        self._spans.close()

    def abandon(self) -> None:
        """Close the open span, if there is one, as if it had never been opened."""
        self._spans.close()

    def keep(self, layer: int, rows_BK: Tensor) -> None:
        raise UnsupportedError(
            "a hierarchical cache evicts no row: visibility follows from distance. Choose smaller "
            "windows, collapse leaves, or truncate"
        )

    def truncate(self, lengths: Sequence[int]) -> None:
        self._spans.check_closed("truncate")
        if len(lengths) != 1 or not 0 <= lengths[0] <= self.num_leaves:
            raise CacheError(f"truncate: got {tuple(lengths)}, want one of at most {self.lengths}")
        fork = self._spans.marks
        if fork is not None and lengths[0] < fork.low:
            fork.saved.append(self.save(Span(start=lengths[0], end=fork.low)))
            fork.low = lengths[0]
        self.num_leaves = lengths[0]

    def fork(self) -> None:
        self._spans.fork(lambda: _Fork(num_leaves=self.num_leaves, low=self.num_leaves))

    def commit(self) -> None:
        self._spans.commit()

    def discard(self) -> None:
        fork = self._spans.discard()
        for saved in fork.saved:
            self._put(saved)
        self.num_leaves = fork.num_leaves

    def reset(self) -> None:
        self.num_leaves = 0
        self._spans.reset()

    def digest(self) -> str:
        """As the interface says, over the rows of all levels, seen or not."""
        nodes = self.hierarchy.nodes(Span(start=0, end=self.num_leaves))
        layers = (
            (store.read(layer, slice(level.start, level.stop)), self._numbers(level))
            for layer in range(self.num_layers)
            for store, level in zip(self.levels, nodes, strict=True)
        )
        return row_digest(self.lengths, layers)

    def save(self, span: Span) -> SavedRows:
        """A copy of a span's rows, of every node that is full with one of its leaves."""
        parts = tuple(
            tuple(
                part[:, :, level.start : level.stop].clone()
                for plane in store.parts
                for part in plane
            )
            for store, level in zip(self.levels, self.hierarchy.nodes(span), strict=True)
        )
        return SavedRows(span=span, parts=parts)

    def restore(self, saved: SavedRows) -> None:
        """Append rows that were saved from equal leaves after an equal past.

        They take the place of what the cache has of their span. A hit is a leaf that it lacked.

        Raises:
            CacheError: they do not continue the cache; nothing was changed.
        """
        self._spans.check_closed("restore")
        hits = saved.span.end - self.num_leaves
        if not 0 < hits <= saved.span.num_leaves:
            raise CacheError(
                f"restore: rows from leaf {saved.span.start} on, want {self.num_leaves}, where the "
                "cache ends"
            )
        self.truncate([saved.span.start])
        self._put(saved)
        self.num_leaves = saved.span.end
        self.counters.prefix_hits += hits

    def _put(self, saved: SavedRows) -> None:
        for store, level, sources in zip(
            self.levels, self.hierarchy.nodes(saved.span), saved.parts, strict=True
        ):
            targets = (part for plane in store.parts for part in plane)
            for target, source in zip(targets, sources, strict=True):
                target[:, :, level.start : level.stop] = source

    def _visible(self, layer: int) -> tuple[range, ...]:
        span = self.span
        if layer not in self._written:
            span = Span(start=span.start, end=span.start)
        return self.hierarchy.keys(span)

    def _last_leaves(self, nodes: Sequence[range]) -> Tensor:
        return torch.cat(
            [
                (self._numbers(level) + 1) * self.hierarchy.group**number - 1
                for number, level in enumerate(nodes)
            ],
            dim=1,
        )

    def _numbers(self, nodes: range) -> Tensor:
        return torch.arange(nodes.start, nodes.stop, device=self.device)[None]
