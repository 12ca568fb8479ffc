"""Whatever is edited, rows are a full recompute's, and no leaf before the edit is computed."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scope_contracts.errors import CacheError, UserInputError
from scope_rt.lm.hierarchical.context import Collapse, Edit, Expand, Replace, WorkingContext
from scope_rt.lm.hierarchical.cost import CostModel
from scope_rt.lm.hierarchical.editing import EditableContext
from scope_rt.lm.hierarchical.hierarchy import Hierarchy
from tests.lm.hierarchical.dense import dense, small_cache, small_model, worst_difference
from tests.lm.hierarchical.small_context import (
    HIERARCHIES,
    MODEL,
    STRICT,
    TOKENS,
    editable,
    recomputed,
)
from tests.rounding import FP64_CONTRACT, any_order_bound

pytestmark = pytest.mark.numeric

MODEL_FP32 = small_model(torch.float32)


def some_edits(context: WorkingContext, draw: random.Random, most: int = 3) -> list[Edit]:
    """Edits that fit, one after the other."""
    edits: list[Edit] = []
    for _ in range(draw.randint(1, most)):
        level = draw.choice((1, 1, 2))
        span = context.group**level
        gists = context.starts[context.levels > 0].tolist()
        wanted: list[Edit] = [
            Collapse(draw.randrange(max(1, context.tokens.numel() // span)) * span, level),
            Replace(draw.randrange(context.tokens.numel()), (draw.randrange(11),)),
        ]
        if gists:
            wanted.append(Expand(draw.choice(gists)))
        edit = draw.choice(wanted)
        try:
            context = context.edited([edit])
        except UserInputError:
            continue
        edits.append(edit)
    return edits


@settings(max_examples=24, deadline=None)
@given(
    hierarchy=st.sampled_from(HIERARCHIES),
    seed=st.integers(0, 10_000),
    bit_equal=st.booleans(),
    undo=st.booleans(),
)
def test_after_any_edits_every_row_is_that_of_a_dense_full_recompute(
    hierarchy: Hierarchy, seed: int, bit_equal: bool, undo: bool
) -> None:
    draw = random.Random(seed)
    chunk = hierarchy.group**2
    undo_bytes = 20_000 if undo else 0
    made = editable(hierarchy, chunk_leaves=chunk, bit_equal=bit_equal, undo_bytes=undo_bytes)
    made.append([draw.randrange(11) for _ in range(draw.randint(4, 20))])
    for _ in range(4):
        if draw.random() < 0.5:
            made.edit(some_edits(made.context, draw))
        else:
            made.append([draw.randrange(11) for _ in range(draw.randint(1, 3))])
    assert worst_difference(MODEL, hierarchy, made) < FP64_CONTRACT
    if bit_equal:
        assert made.cache.digest() == recomputed(made).cache.digest()


def test_without_rolling_back_far_enough_the_rows_would_be_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    near = HIERARCHIES[-1]
    strictly = lambda self, prefix, *, old_leaves, new_leaves: prefix  # noqa: E731
    monkeypatch.setattr(Hierarchy, "rollback", strictly)
    made = editable(near, tokens=TOKENS)
    made.edit([Replace(14, (0,))])
    assert worst_difference(MODEL, near, made) > 1e-3


@pytest.mark.parametrize("hierarchy", HIERARCHIES)
def test_an_edit_on_the_chunk_grid_gives_the_bits_of_a_full_recompute(
    hierarchy: Hierarchy,
) -> None:
    chunk = hierarchy.group**2
    tokens = TOKENS[: 5 * chunk]
    made = editable(hierarchy, tokens=tokens, chunk_leaves=chunk)
    report = made.edit([Replace(2 * chunk, (0,))])
    assert report.computed_leaves == len(tokens) - 2 * chunk
    fresh = recomputed(made)
    assert made.cache.digest() == fresh.cache.digest()
    assert torch.equal(made.last_leaf, fresh.last_leaf)


def test_token_by_token_is_the_same_as_at_once() -> None:
    made = editable(tokens=TOKENS[:13])
    stepped = editable()
    for token in TOKENS[:13]:
        stepped.append([token])
    assert worst_difference(MODEL, STRICT, stepped) < FP64_CONTRACT
    torch.testing.assert_close(made.last_leaf, stepped.last_leaf, rtol=0, atol=FP64_CONTRACT)


def test_the_earliest_edit_of_a_batch_is_the_only_rollback() -> None:
    made = editable(tokens=TOKENS)
    report = made.edit([Collapse(20), Collapse(12), Collapse(14), Collapse(12, 2)])
    assert report.first_changed_leaf == report.first_dirty_leaf == 12
    assert report.num_leaves == 24 - 3 - 1
    assert report.changed_runs == 2
    assert report.computed_leaves == report.num_leaves - 12
    assert worst_difference(MODEL, STRICT, made) < FP64_CONTRACT


def test_edits_that_cancel_compute_nothing() -> None:
    made = editable(tokens=TOKENS)
    before, written = made.cache.digest(), made.cache.counters.rows_written
    report = made.edit([Collapse(4), Expand(4)])
    assert report.computed_leaves == report.changed_runs == 0
    assert report.spatial_ratio == report.temporal_ratio == 0
    assert made.cache.counters.rows_written == written
    assert made.cache.digest() == before


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_what_an_edit_dirties_in_space_is_part_of_what_it_dirties_in_time(seed: int) -> None:
    draw = random.Random(seed)
    made = editable(tokens=TOKENS)
    report = made.edit(some_edits(made.context, draw))
    assert 0 <= report.spatial_ratio <= report.temporal_ratio <= 1


def test_the_invalidation_ratios_of_one_replaced_token() -> None:
    made = editable(tokens=TOKENS)  # 24 leaves, 12 LOD1, 6 LOD2
    report = made.edit([Replace(16, (0,))])
    assert report.spatial_ratio == pytest.approx(3 / 42)
    assert report.temporal_ratio == pytest.approx((8 + 4 + 2) / 42)


def test_an_early_edit_falls_back_to_a_full_recompute_and_is_counted() -> None:
    made = editable(tokens=TOKENS)
    late = made.edit([Replace(20, (0,))])
    assert not late.full_recompute
    assert late.predicted_gain == pytest.approx(6)
    early = made.edit([Replace(3, (0,))])
    assert early.full_recompute
    assert early.predicted_gain == pytest.approx(24 / 21)
    assert early.computed_leaves == 24
    assert made.counters.full_recomputes == 1
    assert worst_difference(MODEL, STRICT, made) < FP64_CONTRACT
    dear = editable(tokens=TOKENS, cost=CostModel(linear=0.0, quadratic=1.0))
    assert dear.edit([Replace(12, (0,))]).predicted_gain == pytest.approx(4 / 3)
    assert dear.edit([Replace(9, (0,))]).full_recompute


@pytest.mark.parametrize("hierarchy", HIERARCHIES)
@pytest.mark.parametrize("bit_equal", [False, True])
def test_a_shorter_context_has_its_own_last_output(hierarchy: Hierarchy, bit_equal: bool) -> None:
    for num_leaves in (1, 15, 18):
        made = editable(
            hierarchy, tokens=TOKENS, chunk_leaves=hierarchy.group**2, bit_equal=bit_equal
        )
        made.load(WorkingContext.of(TOKENS[:num_leaves], group=hierarchy.group))
        assert worst_difference(MODEL, hierarchy, made) < FP64_CONTRACT
        assert not bit_equal or made.cache.digest() == recomputed(made).cache.digest()
    made.load(WorkingContext.of((), group=hierarchy.group))
    with pytest.raises(CacheError, match="the context is empty"):
        made.last_leaf  # noqa: B018


def test_single_precision_differs_by_rounding_only() -> None:
    made = EditableContext(MODEL_FP32, small_cache(STRICT, dtype=torch.float32), chunk_leaves=4)
    made.append(TOKENS)
    made.edit([Collapse(18), Replace(7, (0,))])
    single, double = (dense(model, STRICT, made.context)[0] for model in (MODEL_FP32, MODEL))
    rounding = any_order_bound(single, double, num_terms=len(single))
    assert worst_difference(MODEL_FP32, STRICT, made) <= rounding
