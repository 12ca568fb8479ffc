"""What was undone comes back from its old blocks, and a discarded speculation leaves no trace."""

import pytest
import torch

from scope_contracts.errors import CacheError
from scope_rt.lm.hierarchical.context import Collapse, Expand, Replace, WorkingContext
from tests.lm.hierarchical.dense import small_cache, worst_difference
from tests.lm.hierarchical.small_context import (
    MODEL,
    STRICT,
    TOKENS,
    editable,
    model_raises_in_the_second_chunk,
)
from tests.rounding import FP64_CONTRACT


def test_undo_takes_the_old_blocks_back() -> None:
    made = editable(tokens=TOKENS, undo_bytes=1 << 20)
    before = made.cache.digest()
    made.edit([Collapse(8)])
    assert made.cache.digest() != before
    computed = made.counters.computed_leaves
    undone = made.edit([Expand(8)])
    assert made.cache.digest() == before
    assert undone.reused_leaves == 12  # blocks 8..11, 12..15, 16..19; the last is computed
    assert made.counters.computed_leaves - computed == 4
    redone = made.edit([Collapse(8)])
    assert redone.reused_leaves == 12
    assert made.cache.counters.prefix_hits == made.counters.reused_leaves == 24
    assert worst_difference(MODEL, STRICT, made) < FP64_CONTRACT


def test_an_undo_off_the_block_grid_counts_the_leaves_that_it_saved() -> None:
    made = editable(tokens=TOKENS, undo_bytes=1 << 20)
    made.edit([Collapse(6)])
    computed = made.counters.computed_leaves
    undone = made.edit([Expand(6)])
    assert undone.first_dirty_leaf == 6
    assert undone.reused_leaves == 14  # 6, 7 and blocks 8..11, 12..15, 16..19
    assert made.cache.counters.prefix_hits == made.counters.reused_leaves == 14
    assert made.counters.computed_leaves - computed == undone.computed_leaves == 4
    assert worst_difference(MODEL, STRICT, made) < FP64_CONTRACT


def block_bytes() -> int:
    """Of 4 leaves and what is above them."""
    rows = small_cache(STRICT)
    return sum(rows.format.bytes_per_row * rows.num_layers * count for count in STRICT.counts(4))


def test_what_undo_may_keep_is_bounded_in_bytes() -> None:
    for max_bytes, kept in ((2 * block_bytes(), 2), (block_bytes() - 1, 0)):
        made = editable(tokens=TOKENS, undo_bytes=max_bytes)
        made.edit([Collapse(0)])
        assert made.replaced is not None
        assert (len(made.replaced), made.replaced.num_bytes) == (kept, kept * block_bytes())
    assert made.edit([Expand(0)]).reused_leaves == 0


@pytest.mark.parametrize("chunk_leaves", [1, 4])
def test_a_committed_speculation_is_the_straight_decode(chunk_leaves: int) -> None:
    straight = editable(tokens=TOKENS[:10], chunk_leaves=chunk_leaves)
    forked = editable(tokens=TOKENS[:10], chunk_leaves=chunk_leaves)
    forked.fork()
    for made in (straight, forked):
        made.append(TOKENS[10:13])
        made.edit([Collapse(6)])
        made.append(TOKENS[13:])
    forked.commit()
    assert forked.cache.digest() == straight.cache.digest()
    assert torch.equal(forked.last_leaf, straight.last_leaf)


def test_a_discarded_speculation_leaves_no_trace() -> None:
    made = editable(tokens=TOKENS, undo_bytes=1 << 20)
    before, last = made.cache.digest(), made.last_leaf
    made.fork()
    made.append([1, 2, 3])
    made.edit([Collapse(16, 2)])
    made.edit([Collapse(4), Replace(22, (0,))])
    made.edit([Expand(4)])
    assert made.cache.digest() != before
    made.discard()
    assert made.cache.digest() == before
    assert made.context.num_leaves == len(TOKENS)
    assert torch.equal(made.last_leaf, last)
    made.append([1])
    assert worst_difference(MODEL, STRICT, made) < FP64_CONTRACT


def test_beside_undo_the_prefix_always_stays_and_the_prediction_knows_what_is_held() -> None:
    made = editable(tokens=TOKENS, undo_bytes=1 << 20)
    early = made.edit([Replace(4, (0,))])
    assert early.predicted_gain == pytest.approx(24 / 20)
    assert (early.full_recompute, early.computed_leaves, early.reused_leaves) == (False, 20, 0)
    undone = made.edit([Replace(4, (TOKENS[4],))])
    assert undone.predicted_gain == pytest.approx(24 / 4)
    assert (undone.full_recompute, undone.computed_leaves, undone.reused_leaves) == (False, 4, 16)
    assert made.counters.full_recomputes == 0
    assert worst_difference(MODEL, STRICT, made) < FP64_CONTRACT


def test_undo_keeps_no_row_from_behind_the_end_of_the_cache() -> None:
    made = editable(tokens=TOKENS, undo_bytes=3 * block_bytes())
    with model_raises_in_the_second_chunk():
        made.edit([Replace(12, (0,))])
    assert made.cache.num_leaves == 12 < made.context.num_leaves
    made.load(WorkingContext.of(TOKENS[:12], group=2))
    assert made.append(TOKENS[12:]).reused_leaves == 4
    assert worst_difference(MODEL, STRICT, made) < FP64_CONTRACT


def test_a_cleared_context_is_in_no_speculative_span() -> None:
    made = editable(tokens=TOKENS)
    made.fork()
    made.append([1])
    made.clear()
    for ending in (made.commit, made.discard):
        with pytest.raises(CacheError, match="fork first"):
            ending()
    assert made.context.num_leaves == made.cache.num_leaves == 0
