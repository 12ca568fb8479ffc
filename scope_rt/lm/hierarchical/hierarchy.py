"""Which node sees which follows from indices alone, and the past is seen once: nothing twice.

Node j of level n > 0 (LOD n) pools nodes `j*group .. (j+1)*group - 1` of level n - 1, and so covers
the leaves `j*group**n .. (j+1)*group**n - 1`. Only full groups exist. At its last leaf it comes
after that leaf and after lower levels.

* A leaf sees itself and the latest leaves, at most `windows[0]` of them; then, where these begin,
  the LOD1 nodes before, at most `windows[1]`; then LOD2, and so on. Each level but the top begins
  at a group boundary of the level above, so that levels meet without a gap. The top level forgets
  what lies before its window.
* A node of level n > 0 sees its `group` children and itself.
* Near-causal: a leaf also sees the nodes that cover itself, once their groups are full; leaves
  after it have a part in these. Strictly causal is the default.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from scope_contracts.errors import UserInputError, mismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The leaves `start .. end - 1`, and the nodes that become full with one of them."""

    start: int
    end: int

    @property
    def num_leaves(self) -> int:
        return self.end - self.start

    def cut(self, size: int) -> "list[Span]":
        """The span in pieces that end on multiples of `size`; the last one ends where it does."""
        bounds = [*range(self.start // size * size + size, self.end, size), self.end]
        starts = [self.start, *bounds]
        return [Span(start=s, end=e) for s, e in zip(starts, bounds, strict=False) if s < e]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """The shape of the tree and what is visible in it.

    Raises `UserInputError` for a window too small to hold a group.
    """

    group: int = 32
    """Nodes that one node of the next level pools."""
    windows: tuple[int | None, ...] = (256, 128, None)
    """Nodes of each level that a leaf sees, leaves first; None is all of them."""
    near_causal: bool = False

    def __post_init__(self) -> None:
        if self.group < 2 or not self.windows:
            got = (self.group, self.windows)
            raise UserInputError(mismatch("group, windows", got=got, want="2 or more, not empty"))
        for level, window in enumerate(self.windows):
            least = self.group if level < self.top else 1
            if window is not None and window < least:
                want = f"at least {least}, for one group must fit"
                raise UserInputError(mismatch(f"windows[{level}]", got=window, want=want))

    @property
    def top(self) -> int:
        """The highest level."""
        return len(self.windows) - 1

    def counts(self, num_leaves: int) -> tuple[int, ...]:
        """Nodes of every level that `num_leaves` leaves have."""
        return tuple(num_leaves // self.group**level for level in range(len(self.windows)))

    def nodes(self, span: Span) -> tuple[range, ...]:
        """Nodes of every level that the span brings."""
        return tuple(map(range, self.counts(span.start), self.counts(span.end)))

    def keys(self, span: Span) -> tuple[range, ...]:
        """Nodes of every level that some node of the span, or else the next leaf, sees: one run.

        A level of which nothing is seen has an empty run, so full attention reads leaves alone.
        """
        leaves = torch.tensor([span.start, max(span.start, span.end - 1)])
        firsts, ends = self._seen_by_leaves(leaves)
        nodes, counts, runs = self.nodes(span), self.counts(span.end), []
        for level, count in enumerate(counts):
            above = nodes[level + 1] if level < self.top else range(0)
            children = range(above.start * self.group, above.stop * self.group)
            by_leaves = range(int(firsts[level][0]), min(count, int(ends[level][1])))
            seen = [run for run in (by_leaves, nodes[level], children) if run]
            runs.append(
                range(min(r.start for r in seen), max(r.stop for r in seen)) if seen else range(0)
            )
        return tuple(runs)

    def mask(self, span: Span) -> Tensor:
        """Bool `[nodes of the span, keys of the span]`, both level by level: who sees whom."""
        queries, keys = self.nodes(span), self.keys(span)
        leaves = torch.arange(span.start, span.end)
        firsts, ends = self._seen_by_leaves(leaves)
        rows = [self._row(keys, firsts, ends, own=leaves if self.near_causal else None)]
        for level in range(1, len(self.windows)):
            nodes = torch.arange(queries[level].start, queries[level].stop)
            empty = [torch.zeros_like(nodes)] * len(self.windows)
            firsts, ends = list(empty), list(empty)
            firsts[level - 1], ends[level - 1] = nodes * self.group, (nodes + 1) * self.group
            firsts[level], ends[level] = nodes, nodes + 1
            rows.append(self._row(keys, firsts, ends))
        return torch.cat(rows)

    def rollback(self, prefix: int, *, old_leaves: int, new_leaves: int) -> int:
        """The leaf from which all levels must be computed anew.

        `prefix` is the number of leaves that the old and the new context share at their beginning.
        Strictly causal, that is all that stays. Near-causal, leaves of a group saw its later
        leaves: the answer is the start of the largest group around `prefix` that is full, before
        or after.
        """
        if not self.near_causal or prefix == old_leaves == new_leaves:
            return prefix
        start = prefix
        for level in range(1, len(self.windows)):
            size = self.group**level
            block = prefix // size * size
            if block + size <= max(old_leaves, new_leaves):
                start = block
        return start

    def _seen_by_leaves(self, leaves: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """First and end node of every level that the leaves `[Q]` see."""
        firsts, ends, end = [], [], leaves + 1
        for level, window in enumerate(self.windows):
            first = torch.zeros_like(end) if window is None else (end - window).clamp(min=0)
            if level < self.top:
                first = -(-first // self.group) * self.group
            firsts.append(first)
            ends.append(end)
            end = first // self.group
        return firsts, ends

    def _row(
        self,
        keys: tuple[range, ...],
        firsts: list[Tensor],
        ends: list[Tensor],
        own: Tensor | None = None,
    ) -> Tensor:
        """The mask of some queries: an interval of each level, and the nodes that cover `own`."""
        parts = []
        for level, nodes in enumerate(keys):
            key = torch.arange(nodes.start, nodes.stop)
            seen = (key >= firsts[level][:, None]) & (key < ends[level][:, None])
            if own is not None and level > 0:
                seen |= key == own[:, None] // self.group**level
            parts.append(seen)
        return torch.cat(parts, dim=1)
