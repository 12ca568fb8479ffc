"""The multi-level model alone: causality, pooling and positions."""

import math

import torch

from scope_rt.lm.hierarchical.context import Collapse, Replace, WorkingContext
from scope_rt.lm.hierarchical.hierarchy import Hierarchy
from tests.lm.hierarchical.dense import dense, small_model
from tests.rounding import gamma

MODEL = small_model()
STRICT = Hierarchy(group=2, windows=(4, 2, None))
NEAR = Hierarchy(group=2, windows=(4, 2, None), near_causal=True)
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]


def outputs(hierarchy: Hierarchy, context: WorkingContext) -> torch.Tensor:
    """Of the leaves."""
    return dense(MODEL, hierarchy, context)[0][: context.num_leaves]


def first_difference(hierarchy: Hierarchy, change: int) -> int:
    """The first leaf that differs when the token at `change` is another."""
    before = WorkingContext.of(TOKENS, group=2)
    after = before.edited([Replace(change, (0,))])
    moved = (outputs(hierarchy, before) - outputs(hierarchy, after)).abs().amax(1) > 0
    return int(moved.nonzero()[0])


def test_strictly_causal_leaves_depend_on_no_later_leaf() -> None:
    assert [first_difference(STRICT, change) for change in (0, 5, 7, 11)] == [0, 5, 7, 11]


def test_near_causal_leaves_depend_on_no_leaf_behind_their_largest_full_group() -> None:
    assert [first_difference(NEAR, change) for change in (3, 5, 7, 11)] == [0, 4, 4, 8]


def test_a_leaf_hears_of_leaves_outside_its_window_through_summaries() -> None:
    windowed = Hierarchy(group=2, windows=(4, None))
    forgetful = Hierarchy(group=2, windows=(4, 1))
    before = WorkingContext.of(TOKENS * 3, group=2)
    after = before.edited([Replace(0, (0,))])
    changes = []
    for hierarchy in (windowed, forgetful):
        difference = outputs(hierarchy, before)[-1] - outputs(hierarchy, after)[-1]
        changes.append(float(difference.abs().max()))
    assert changes[0] > 0
    assert changes[1] == 0


def test_a_gist_leaf_enters_as_the_pooled_inputs_of_its_tokens() -> None:
    gist = WorkingContext.of(TOKENS, group=2).edited([Collapse(4, 2)])
    got = MODEL._leaf_inputs(gist, 4, 5)
    tokens = MODEL.embedding(torch.tensor(TOKENS[4:8]))
    pairs = MODEL.pool(tokens.unflatten(0, (2, 2)).mean(1))
    assert torch.equal(got, MODEL.pool(pairs[None].mean(1)))


def test_a_wider_node_turns_as_its_centre_and_blurs_what_is_fast() -> None:
    context = WorkingContext.of(range(9), group=3)
    token, pair = MODEL._rotations(context, (range(4, 5), range(1, 2)))
    rounding = gamma(8, torch.float64)
    assert (token.abs() - 1).abs().max() <= rounding
    # tokens 3, 4, 5 around token 4
    assert (pair.angle() - token.angle()).abs().max() <= rounding * math.pi
    assert (pair.abs() < 1).all()
    assert pair.abs()[0, 0] < pair.abs()[0, -1]
