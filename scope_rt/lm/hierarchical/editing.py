"""After any edit the cache is what computing the new context from nothing would have made it.

An edit is a new value of the context: the common prefix of old and new leaves stays, everything
after it is truncated and replayed in chunks, and summaries come back as their groups fill. Chunks
end on multiples of `chunk_leaves`. A row computed in a chunk of the same shape has the same bits;
with `bit_equal` a replay begins on that grid too, so that this holds for every row, at the price of
up to `chunk_leaves - 1` more leaves.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from scope_contracts.errors import CacheError, UserInputError, mismatch
from scope_rt.lm.hierarchical.cache import HierarchicalCache
from scope_rt.lm.hierarchical.context import Edit, WorkingContext
from scope_rt.lm.hierarchical.cost import FLAT, LEAST_GAIN, CostModel
from scope_rt.lm.hierarchical.hierarchy import Span
from scope_rt.lm.hierarchical.node_model import CachedNodeAttention, NodeModel
from scope_rt.lm.hierarchical.replaced import ReplacedBlocks, block_names


@dataclass(frozen=True, slots=True, kw_only=True)
class EditReport:
    """What one batch of edits, or one append, did. Ratios are shares of all nodes of all levels."""

    first_changed_leaf: int
    """Length of the common prefix, of which the cache has the rows."""
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
    """Over a full recompute; leaves whose rows undo keeps count as free."""
    full_recompute: bool
    """Whether the prediction was below `LEAST_GAIN` and nothing was kept: never beside undo."""
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

    `undo_bytes` bounds the rows that are kept of what edits replaced. When the model raises, the
    context is the one before, and the next call computes the rows that it lacks then. Raises
    `UserInputError` for chunks that cut a near-causal group, and for more levels than the model's.
    """

    def __init__(
        self,
        model: NodeModel,
        cache: HierarchicalCache,
        *,
        chunk_leaves: int = 128,
        bit_equal: bool = False,
        cost: CostModel = FLAT,
        undo_bytes: int = 0,
    ) -> None:
        hierarchy = cache.hierarchy
        block = hierarchy.group**hierarchy.top if hierarchy.near_causal else 1
        if chunk_leaves < 1 or chunk_leaves % block:
            want = f"a multiple of {block}, the leaves of the largest group"
            raise UserInputError(mismatch("chunk_leaves", got=chunk_leaves, want=want))
        if hierarchy.top >= model.num_levels:
            want = f"at most {model.num_levels}, the levels of the model"
            raise UserInputError(mismatch("levels", got=hierarchy.top + 1, want=want))
        self.model, self.cache, self.chunk_leaves = model, cache, chunk_leaves
        self.bit_equal, self.cost = bit_equal, cost
        self.replaced = ReplacedBlocks(max_bytes=undo_bytes) if undo_bytes else None
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
            UserInputError: a token is not one of the model's.
            CacheError: there is no room. In both cases nothing was changed.
        """
        return self._become(self.context.appended(tokens))

    def edit(self, edits: Sequence[Edit]) -> EditReport:
        """One batch of edits: one rollback to the earliest change, one replay.

        Raises:
            UserInputError: an edit does not fit the leaves, or a token is not one of the model's.
            CacheError: there is no room. In both cases nothing was changed.
        """
        report = self._become(self.context.edited(edits))
        self.counters.edits += 1
        return report

    def load(self, context: WorkingContext) -> EditReport:
        """Become another context; what both share at their start stays.

        Raises:
            UserInputError: its group size, or a token, is not one of the model's and the cache's.
            CacheError: there is no room. In both cases nothing was changed.
        """
        return self._become(context)

    def clear(self) -> None:
        """Forget all leaves; a speculative span ends too."""
        self.cache.reset()
        self._state = _State(WorkingContext.of((), group=self.context.group), [], None)

    def time_chunk(self, start: int, clock: Callable[[], float]) -> float:
        """Seconds to compute the chunk from leaf `start` on once more; nothing is changed."""
        with ExitStack() as stack:
            self.cache.fork()
            stack.callback(self.cache.discard)
            self.cache.truncate([start])
            _wait_for(self.last_leaf)
            begin = clock()
            _wait_for(self._compute(self.context, Span(start=start, end=start + self.chunk_leaves)))
            return clock() - begin

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
        self._check(new)
        old, hierarchy = self.context, self.cache.hierarchy
        prefix = min(old.common_prefix(new), self.cache.num_leaves)
        start = self._first_dirty(prefix, new)
        undoable = self.replaced is not None
        names = block_names(new, block_leaves=self.chunk_leaves) if undoable else []
        self._keep_for_undo(start)
        gain = self.cost.gain(self._missing(new, start, names), num_leaves=new.num_leaves)
        full = not undoable and prefix < old.num_leaves and gain < LEAST_GAIN
        if full:
            start = 0
        self.cache.truncate([start])
        with ExitStack() as stack:
            stack.callback(self._give_up, start)
            hits = self.cache.counters.prefix_hits
            last_leaf = self._replay(new, start, names)
            stack.pop_all()
        reused = self.cache.counters.prefix_hits - hits
        self._state = _State(new, names, last_leaf)
        computed = new.num_leaves - start - reused
        self.counters.full_recomputes += full
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

    def _check(self, new: WorkingContext) -> None:
        """Refuse what model and cache cannot hold."""
        group, vocab_size = self.cache.hierarchy.group, self.model.vocab_size
        if new.group != group:
            raise UserInputError(mismatch("group of the context", got=new.group, want=group))
        strange = new.tokens[(new.tokens < 0) | (new.tokens >= vocab_size)]
        if strange.numel():
            want = f"0 .. {vocab_size - 1}, the model's vocabulary"
            raise UserInputError(mismatch("token", got=int(strange[0]), want=want))
        if new.num_leaves > self.cache.max_leaves:
            raise CacheError(
                f"{new.num_leaves} leaves do not fit {self.cache.max_leaves}; raise max_leaves, or "
                "collapse leaves"
            )

    def _first_dirty(self, prefix: int, new: WorkingContext) -> int:
        """From where on `new` is computed; its last chunk if it is but a shorter context.

        The output at the last leaf is not kept with its rows.
        """
        old_leaves, new_leaves = self.context.num_leaves, new.num_leaves
        start = self.cache.hierarchy.rollback(prefix, old_leaves=old_leaves, new_leaves=new_leaves)
        if start == new_leaves < old_leaves:
            start = max(0, start - 1) // self.chunk_leaves * self.chunk_leaves
        if self.bit_equal and start < new_leaves:
            start -= start % self.chunk_leaves
        return start

    def _keep_for_undo(self, start: int) -> None:
        """Store the full blocks that go when the cache is truncated to `start`."""
        if self.replaced is None:
            return
        first, end = (leaves // self.chunk_leaves for leaves in (start, self.cache.num_leaves))
        for number, name in enumerate(self._state.names[first:end], start=first):
            if name not in self.replaced:
                at = number * self.chunk_leaves
                rows = self.cache.save(Span(start=at, end=at + self.chunk_leaves))
                self.replaced.put(name, rows)

    def _is_held(self, span: Span, new: WorkingContext, names: Sequence[bytes]) -> bool:
        """Whether undo has the block that a span ends; the last one is computed anyway."""
        if self.replaced is None or span.end >= new.num_leaves:
            return False
        return names[span.end // self.chunk_leaves - 1] in self.replaced

    def _missing(self, new: WorkingContext, start: int, names: Sequence[bytes]) -> list[Span]:
        """What a replay from `start` on computes."""
        spans = Span(start=start, end=new.num_leaves).cut(self.chunk_leaves)
        return [span for span in spans if not self._is_held(span, new, names)]

    def _replay(self, new: WorkingContext, start: int, names: Sequence[bytes]) -> Tensor | None:
        """Fill the cache from `start` on: the output at the last leaf."""
        last_leaf = self._state.last_leaf if new.num_leaves else None
        for span in Span(start=start, end=new.num_leaves).cut(self.chunk_leaves):
            rows = None
            if self.replaced is not None and self._is_held(span, new, names):
                rows = self.replaced.take(names[span.end // self.chunk_leaves - 1])
            if rows is None:
                last_leaf = self._compute(new, span)
            else:
                self.cache.restore(rows)
        return last_leaf

    def _give_up(self, start: int) -> None:
        """Keep the rows that the old context shares."""
        self.cache.abandon()
        self.cache.truncate([start])

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


def _wait_for(output: Tensor) -> None:
    """Until it is there, and all that the device was asked to do before it: calls only launch."""
    output[0].item()
