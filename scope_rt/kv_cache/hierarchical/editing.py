"""After any edit the cache is what computing the new context from nothing would have made it.

An edit is a new value of the context: the common prefix of old and new leaves stays, everything
after it is truncated and replayed in chunks, and summaries come back as their groups fill. Chunks
end on multiples of `chunk_leaves`. A row computed in a chunk of the same shape has the same bits;
with `bit_equal` a replay begins on that grid too, so that this holds for every row, at the price of
up to `chunk_leaves - 1` more leaves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from scope_contracts.errors import CacheError, UserInputError, mismatch
from scope_rt.kv_cache.hierarchical.cache import HierarchicalCache
from scope_rt.kv_cache.hierarchical.context import Edit, WorkingContext
from scope_rt.kv_cache.hierarchical.cost import FLAT, LEAST_GAIN, CostModel
from scope_rt.kv_cache.hierarchical.hierarchy import Span
from scope_rt.kv_cache.hierarchical.replaced import ReplacedBlocks, block_names


class NodeAttention(Protocol):
    """`(layer, q, k, v) -> out`, each `[1, nodes, heads, head_dim]`."""

    def __call__(self, layer: int, q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor) -> Tensor: ...


class NodeModel(Protocol):
    """A causal model over leaves and summaries: `scope_rt.models.multilevel` is one."""

    def __call__(
        self, context: WorkingContext, nodes: Sequence[range], attend: NodeAttention
    ) -> Tensor:
        """Compute these nodes, level by level, and return them: `[nodes, channels]`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedNodeAttention:
    """Writes a span's rows and attends to those that each of its nodes may see."""

    cache: HierarchicalCache
    hidden_keys: Tensor
    """0 where a node sees a key, else -inf: `[nodes, keys]`."""

    def __call__(self, layer: int, q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor) -> Tensor:
        self.cache.append(layer, k_BTHD, v_BTHD)
        k, v = self.cache.view(layer)
        q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k, v))
        return F.scaled_dot_product_attention(q, k, v, self.hidden_keys).transpose(1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class EditReport:
    """What one batch of edits, or one append, did. Ratios are shares of all nodes of all levels."""

    first_changed_leaf: int
    """Length of the common prefix."""
    first_dirty_leaf: int
    """Where all levels were rolled back to."""
    num_leaves: int
    changed_runs: int
    """Runs of neighbouring new leaves, after overlapping edits became one."""
    spatial_ratio: float
    """New leaves and the summaries above them."""
    temporal_ratio: float
    """Nodes from the first dirty leaf on: what the rollback drops. It holds the spatial ones."""
    predicted_gain: float
    full_recompute: bool
    """Whether the prediction was below `LEAST_GAIN` and nothing was kept."""
    computed_leaves: int
    reused_leaves: int
    """Leaves whose rows an earlier edit had dropped, and came back."""


@dataclass(slots=True, kw_only=True)
class EditCounters:
    """Exact since the start."""

    edits: int = 0
    full_recomputes: int = 0
    computed_leaves: int = 0
    reused_leaves: int = 0


@dataclass(frozen=True, slots=True)
class _State:
    """What a discard brings back besides the cache's rows."""

    context: WorkingContext
    names: list[bytes]
    last_leaf: Tensor | None


class EditableContext:
    """A working context, its model and its cache, kept equal to each other.

    Raises `UserInputError` for chunks that cut a near-causal group.
    """

    def __init__(
        self,
        model: NodeModel,
        cache: HierarchicalCache,
        *,
        chunk_leaves: int = 128,
        bit_equal: bool = False,
        cost: CostModel = FLAT,
        replaced: ReplacedBlocks | None = None,
    ) -> None:
        hierarchy = cache.hierarchy
        block = hierarchy.group**hierarchy.top if hierarchy.near_causal else 1
        if chunk_leaves < 1 or chunk_leaves % block:
            want = f"a multiple of {block}, the leaves of the largest group"
            raise UserInputError(mismatch("chunk_leaves", got=chunk_leaves, want=want))
        self.model, self.cache, self.chunk_leaves = model, cache, chunk_leaves
        self.bit_equal, self.cost, self.replaced = bit_equal, cost, replaced
        self.counters = EditCounters()
        self._state = _State(WorkingContext.of((), group=hierarchy.group), [], None)
        self._forked: _State | None = None

    @property
    def context(self) -> WorkingContext:
        return self._state.context

    @property
    def last_leaf(self) -> Tensor:
        """The model's output at the last leaf, `[channels]`.

        Raises:
            CacheError: the context is empty.
        """
        if self._state.last_leaf is None:
            raise CacheError("the context is empty; append tokens first")
        return self._state.last_leaf

    def append(self, tokens: Sequence[int]) -> EditReport:
        """Tokens come as leaves at the end.

        Raises:
            CacheError: there is no room; nothing was changed.
        """
        return self._become(self.context.appended(tokens))

    def edit(self, edits: Sequence[Edit]) -> EditReport:
        """One batch of edits: one rollback to the earliest change, one replay.

        Raises:
            UserInputError: an edit does not fit the leaves.
            CacheError: there is no room. In both cases nothing was changed.
        """
        report = self._become(self.context.edited(edits))
        self.counters.edits += 1
        return report

    def load(self, context: WorkingContext) -> EditReport:
        """Become another context of the same group size; what both share at their start stays.

        Raises:
            CacheError: there is no room; nothing was changed.
        """
        return self._become(context)

    def clear(self) -> None:
        """Forget all leaves; a speculative span ends too."""
        self.cache.reset()
        self._state = _State(WorkingContext.of((), group=self.context.group), [], None)
        self._forked = None

    def time_chunk(self, start: int, clock: Callable[[], float]) -> float:
        """Seconds to compute the chunk from leaf `start` on once more; nothing is changed."""
        self.cache.fork()
        self.cache.truncate([start])
        begin = clock()
        self._compute(self.context, Span(start=start, end=start + self.chunk_leaves))
        seconds = clock() - begin
        self.cache.discard()
        return seconds

    def fork(self) -> None:
        """Begin a speculative span of appends and edits."""
        self.cache.fork()
        self._forked = self._state

    def commit(self) -> None:
        """Keep what was done since the fork."""
        self.cache.commit()
        self._forked = None

    def discard(self) -> None:
        """Be as if there had been no fork; counters go on."""
        self.cache.discard()
        if self._forked is not None:
            self._state, self._forked = self._forked, None

    def _become(self, new: WorkingContext) -> EditReport:
        """Roll back to where `new` differs, and replay."""
        old, hierarchy = self.context, self.cache.hierarchy
        if new.num_leaves > self.cache.max_leaves:
            raise CacheError(
                f"{new.num_leaves} leaves do not fit {self.cache.max_leaves}; raise max_leaves, or "
                "collapse leaves"
            )
        prefix = old.common_prefix(new)
        start = hierarchy.rollback(prefix, old_leaves=old.num_leaves, new_leaves=new.num_leaves)
        if self.bit_equal and start < new.num_leaves:
            start -= start % self.chunk_leaves
        gain = self.cost.gain(first_dirty_leaf=start, num_leaves=new.num_leaves)
        full = prefix < old.num_leaves and gain < LEAST_GAIN
        if full:
            self.counters.full_recomputes += 1
            start = 0
        undoable = self.replaced is not None
        names = block_names(new, block_leaves=self.chunk_leaves) if undoable else []
        self._drop(start)
        last_leaf, reused = self._replay(new, start, names)
        self._state = _State(new, names, last_leaf)
        computed = new.num_leaves - start - reused
        self.counters.computed_leaves += computed
        self.counters.reused_leaves += reused
        changed = new.changed_leaves(old)
        return EditReport(
            first_changed_leaf=prefix,
            first_dirty_leaf=start,
            num_leaves=new.num_leaves,
            changed_runs=int((changed.diff() > 1).sum()) + 1 if changed.numel() else 0,
            spatial_ratio=self._share(self._with_ancestors(changed, new.num_leaves), new),
            temporal_ratio=self._share(
                sum(map(len, hierarchy.nodes(Span(start=start, end=new.num_leaves)))), new
            ),
            predicted_gain=gain,
            full_recompute=full,
            computed_leaves=computed,
            reused_leaves=reused,
        )

    def _drop(self, start: int) -> None:
        """Truncate to `start`; full blocks that go are kept for an undo."""
        if self.replaced is not None:
            first = start // self.chunk_leaves
            for number, name in enumerate(self._state.names[first:], start=first):
                if name not in self.replaced:
                    at = number * self.chunk_leaves
                    self.replaced.put(
                        name, self.cache.save(Span(start=at, end=at + self.chunk_leaves))
                    )
        self.cache.truncate([start])

    def _replay(
        self, new: WorkingContext, start: int, names: Sequence[bytes]
    ) -> tuple[Tensor | None, int]:
        """Fill the cache from `start` on: the output at the last leaf, and leaves reused.

        The last block is always computed, for its output is not kept with its rows.
        """
        last_leaf, reused, at = self._state.last_leaf, 0, start
        while at < new.num_leaves:
            number = at // self.chunk_leaves
            end = min((number + 1) * self.chunk_leaves, new.num_leaves)
            rows = None
            if self.replaced is not None and number < len(names) and end < new.num_leaves:
                rows = self.replaced.take(names[number])
            if rows is not None:
                self.cache.truncate([rows.span.start])
                self.cache.restore(rows)
                reused += end - at
            else:
                last_leaf = self._compute(new, Span(start=at, end=end))
            at = end
        return last_leaf, reused

    @torch.no_grad()
    def _compute(self, context: WorkingContext, span: Span) -> Tensor:
        """One forward over the leaves of a span and the summaries they fill."""
        self.cache.extend([span.num_leaves])
        seen = self.cache.hierarchy.mask(span)
        hidden_keys = torch.zeros(seen.shape, dtype=self.cache.levels[0].dtype)
        hidden_keys = hidden_keys.masked_fill(~seen, float("-inf")).to(self.cache.device)
        attend = CachedNodeAttention(cache=self.cache, hidden_keys=hidden_keys)
        output = self.model(context, self.cache.hierarchy.nodes(span), attend)
        self.cache.advance()
        return output[span.num_leaves - 1]

    def _with_ancestors(self, changed: Tensor, num_leaves: int) -> int:
        """How many nodes are changed leaves or lie above one."""
        total = 0
        for level, count in enumerate(self.cache.hierarchy.counts(num_leaves)):
            nodes = torch.unique_consecutive(changed // self.cache.hierarchy.group**level)
            total += int((nodes < count).sum())
        return total

    def _share(self, nodes: int, context: WorkingContext) -> float:
        return nodes / max(1, sum(self.cache.hierarchy.counts(context.num_leaves)))
