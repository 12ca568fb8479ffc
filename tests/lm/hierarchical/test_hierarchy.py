from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scope_contracts.errors import UserInputError
from scope_rt.lm.hierarchical.hierarchy import Hierarchy, Span
from tests.lm.hierarchical.dense import seen_by

HIERARCHIES = (
    Hierarchy(group=2, windows=(3, 2, None)),
    Hierarchy(group=3, windows=(5, 4, 2)),
    Hierarchy(group=2, windows=(4, None)),
    Hierarchy(group=2, windows=(None,)),
    Hierarchy(group=2, windows=(None, 2, None)),  # summaries that no leaf sees
    Hierarchy(group=2, windows=(2, 3, 2, None)),
    Hierarchy(group=2, windows=(3, 2, None), near_causal=True),
)


any_span = given(
    hierarchy=st.sampled_from(HIERARCHIES),
    start=st.integers(0, 30),
    num_leaves=st.integers(1, 20),
)


@settings(max_examples=60, deadline=None)
@any_span
def test_the_mask_of_a_span_is_what_the_rules_say(
    hierarchy: Hierarchy, start: int, num_leaves: int
) -> None:
    if hierarchy.near_causal:
        start = start // 4 * 4  # spans do not cut a group that is full in the end
    span = Span(start=start, end=start + num_leaves)
    keys = [(level, key) for level, run in enumerate(hierarchy.keys(span)) for key in run]
    queries = [(level, node) for level, run in enumerate(hierarchy.nodes(span)) for node in run]
    mask = hierarchy.mask(span)
    assert mask.shape == (len(queries), len(keys))
    for query, row in zip(queries, mask, strict=True):
        got = {keys[index] for index in row.nonzero().flatten().tolist()}
        assert got == seen_by(hierarchy, query, span.end)


@settings(max_examples=60, deadline=None)
@any_span
def test_the_keys_of_every_level_begin_and_end_with_one_that_is_seen(
    hierarchy: Hierarchy, start: int, num_leaves: int
) -> None:
    span = Span(start=start, end=start + num_leaves)
    keys = hierarchy.keys(span)
    for seen in hierarchy.mask(span).any(0).split([len(run) for run in keys]):
        assert seen[:1].all()
        assert seen[-1:].all()


@pytest.mark.parametrize("hierarchy", [h for h in HIERARCHIES if not h.near_causal])
def test_a_leaf_sees_every_earlier_leaf_once_and_no_later_one(hierarchy: Hierarchy) -> None:
    unlimited = hierarchy.windows[-1] is None
    for leaf in range(70):
        covered: Counter[int] = Counter()
        for level, node in seen_by(hierarchy, (0, leaf), 70):
            size = hierarchy.group**level
            covered.update(range(node * size, (node + 1) * size))
        latest = max(covered)
        assert latest == leaf
        assert set(covered.values()) == {1}
        assert sorted(covered) == list(range(min(covered), leaf + 1))
        assert not unlimited or min(covered) == 0


def test_the_number_of_keys_is_bounded_by_the_windows() -> None:
    hierarchy = Hierarchy(group=4, windows=(16, 8, 5))
    for leaf in (400, 40_000, 4_000_000):
        mask = hierarchy.mask(Span(start=leaf, end=leaf + 1))
        assert 16 - 3 + 8 - 3 + 5 <= int(mask[0].sum()) <= 16 + 8 + 5


def test_a_summary_sees_its_children_and_itself_only() -> None:
    hierarchy = Hierarchy(group=2, windows=(4, 4, None))
    span = Span(start=0, end=4)
    keys = [(level, key) for level, run in enumerate(hierarchy.keys(span)) for key in run]
    top = hierarchy.mask(span)[-1]
    assert [keys[i] for i in top.nonzero().flatten()] == [(1, 0), (1, 1), (2, 0)]


@pytest.mark.parametrize(
    ("prefix", "old", "new", "want"),
    [
        (5, 16, 16, 0),  # both groups of 4 and of 16 are full
        (5, 15, 15, 4),  # the group of 4 is full only
        (14, 15, 15, 14),  # no full group saw leaf 14
        (13, 15, 16, 0),  # the new leaves fill the group of 16
        (5, 16, 15, 0),  # and here they no longer do
        (16, 16, 17, 16),  # an append into an empty group
        (16, 16, 16, 16),  # nothing changed
    ],
)
def test_near_causal_rolls_back_to_the_largest_full_group_around_the_change(
    prefix: int, old: int, new: int, want: int
) -> None:
    near = Hierarchy(group=4, windows=(8, 4, None), near_causal=True)
    assert near.rollback(prefix, old_leaves=old, new_leaves=new) == want
    strict = Hierarchy(group=4, windows=(8, 4, None))
    assert strict.rollback(prefix, old_leaves=old, new_leaves=new) == prefix


def test_a_window_smaller_than_a_group_is_refused() -> None:
    with pytest.raises(UserInputError, match=r"windows\[0\]: got 3, want at least 4"):
        Hierarchy(group=4, windows=(3, None))
    with pytest.raises(UserInputError, match="not empty"):
        Hierarchy(windows=())


def test_a_span_is_cut_at_multiples() -> None:
    def cut(start: int, end: int) -> list[tuple[int, int]]:
        return [(span.start, span.end) for span in Span(start=start, end=end).cut(4)]

    assert cut(3, 9) == [(3, 4), (4, 8), (8, 9)]
    assert cut(4, 8) == [(4, 8)]
    assert cut(5, 6) == [(5, 6)]
    assert cut(4, 4) == cut(5, 5) == []


def test_full_attention_is_a_window_of_everything() -> None:
    hierarchy = Hierarchy(group=2, windows=(None, 2))
    mask = hierarchy.mask(Span(start=0, end=6))
    assert torch.equal(mask[:6, :6], torch.ones(6, 6).tril().bool())
    assert not mask[:6, 6:].any()
    for leaf, summaries in ((6, range(0)), (7, range(3, 4))):  # leaf 7 fills one
        span = Span(start=leaf, end=leaf + 1)
        assert hierarchy.keys(span) == (range(leaf + 1), summaries)
