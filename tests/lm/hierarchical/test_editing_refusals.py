"""An edit that is refused, or whose model raises, leaves the context that was there."""

import pytest
import torch

from scope_contracts.errors import CacheError, UserInputError
from scope_rt.lm.hierarchical.context import Collapse, Expand, Replace, WorkingContext
from scope_rt.lm.hierarchical.editing import EditableContext
from scope_rt.lm.hierarchical.hierarchy import Hierarchy
from tests.lm.hierarchical.dense import small_cache, worst_difference
from tests.lm.hierarchical.small_context import (
    HIERARCHIES,
    MODEL,
    STRICT,
    TOKENS,
    editable,
    model_raises_in_the_second_chunk,
)
from tests.rounding import FP64_CONTRACT


def test_what_does_not_fit_is_refused_before_anything_is_touched() -> None:
    made = EditableContext(MODEL, small_cache(STRICT, max_leaves=9), chunk_leaves=4)
    made.append(TOKENS[:8])
    made.edit([Collapse(0)])
    before = made.cache.digest()
    with pytest.raises(CacheError, match="10 leaves do not fit 9; raise max_leaves, or collapse"):
        made.append([1, 2, 3])
    with pytest.raises(UserInputError, match="no gist leaf begins at time 4"):
        made.edit([Expand(0), Expand(4)])
    assert made.cache.digest() == before
    assert made.context.num_leaves == 7


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([11], "token: got 11, want 0 .. 10, the model's vocabulary"),
        ([-1], "token: got -1, want a number from 0 on"),
        ([1, 2**70], "token: got 1180591620717411303424, want a number from 0 on"),
    ],
)
def test_a_token_that_the_model_lacks_is_refused_before_anything_is_touched(
    tokens: list[int], message: str
) -> None:
    made = editable(tokens=TOKENS)
    before, context = made.cache.digest(), made.context
    with pytest.raises(UserInputError, match=message):
        made.edit([Replace(16, tuple(tokens))])
    with pytest.raises(UserInputError, match=message):
        made.append(tokens)
    assert made.cache.digest() == before
    assert made.context is context


def test_a_loaded_context_is_checked_for_tokens_that_the_model_lacks() -> None:
    made = editable(tokens=TOKENS)
    before, context = made.cache.digest(), made.context
    for token in (-1, 11):
        strange = WorkingContext.of(torch.tensor([*TOKENS, token]), group=2)
        with pytest.raises(UserInputError, match=f"token: got {token}, want 0 .. 10"):
            made.load(strange)
    assert made.cache.digest() == before
    assert made.context is context


def test_a_context_of_another_group_and_more_levels_than_the_models_are_refused() -> None:
    made = editable(tokens=TOKENS)
    before = made.cache.digest()
    with pytest.raises(UserInputError, match="group of the context: got 3, want 2"):
        made.load(WorkingContext.of(TOKENS, group=3))
    assert made.cache.digest() == before
    with pytest.raises(UserInputError, match="levels: got 4, want at most 3, the levels of the mo"):
        editable(Hierarchy(group=2, windows=(2, 3, 2, None)))


@pytest.mark.parametrize("hierarchy", [STRICT, HIERARCHIES[-1]])
@pytest.mark.parametrize("undo_bytes", [0, 1 << 20])
def test_when_the_model_raises_the_context_is_the_old_one_and_its_rows_come_back(
    hierarchy: Hierarchy, undo_bytes: int
) -> None:
    made = editable(hierarchy, tokens=TOKENS, undo_bytes=undo_bytes)
    before, context, last_leaf = made.cache.digest(), made.context, made.last_leaf
    with model_raises_in_the_second_chunk():
        made.edit([Replace(12, (0,))])
    assert made.context is context
    assert torch.equal(made.last_leaf, last_leaf)
    made.load(context)
    assert made.cache.digest() == before
    assert worst_difference(MODEL, hierarchy, made) < FP64_CONTRACT


def test_chunks_that_cut_a_near_causal_group_are_refused() -> None:
    near = HIERARCHIES[-1]
    with pytest.raises(UserInputError, match="chunk_leaves: got 6, want a multiple of 4"):
        EditableContext(MODEL, small_cache(near), chunk_leaves=6)
    with pytest.raises(CacheError, match="the context is empty; append tokens first"):
        editable().last_leaf  # noqa: B018
