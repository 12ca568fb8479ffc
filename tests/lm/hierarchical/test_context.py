import pytest
import torch

from scope_contracts.errors import UserInputError
from scope_rt.lm.hierarchical.context import Collapse, Expand, Replace, WorkingContext


def context(num_tokens: int = 12, *, group: int = 2) -> WorkingContext:
    return WorkingContext.of([t % 7 for t in range(num_tokens)], group=group)


def leaves(of: WorkingContext) -> list[tuple[int, int]]:
    return list(zip(of.starts.tolist(), of.levels.tolist(), strict=True))


def test_expand_undoes_collapse_and_leaves_partition_time() -> None:
    before = context()
    gist = before.edited([Collapse(4, 2)])
    assert leaves(gist) == [(t, 0) for t in range(4)] + [(4, 2)] + [(t, 0) for t in range(8, 12)]
    assert gist.spans.sum() == 12
    half = gist.edited([Expand(4)])
    assert leaves(half)[4:6] == [(4, 1), (6, 1)]
    again = half.edited([Expand(4), Expand(6)])
    assert leaves(again) == leaves(before)
    assert again.common_prefix(before) == before.num_leaves


def test_an_edit_moves_no_node_it_does_not_replace() -> None:
    before = context()
    after = before.edited([Collapse(0, 2)])
    center, sigma = after.times(0, after.num_leaves, leaves_per_node=1)
    assert center.tolist() == [1.5, *range(4, 12)]
    assert sigma.tolist() == [pytest.approx((15 / 12) ** 0.5)] + [0.0] * 8
    center, _ = before.times(4, 12, leaves_per_node=1)
    assert center.tolist() == list(range(4, 12))


def test_a_node_stands_at_the_centre_of_the_time_it_covers() -> None:
    after = context(12).edited([Collapse(0, 1), Collapse(2, 1)])
    center, sigma = after.times(0, 2, leaves_per_node=2)
    assert center.tolist() == [1.5, 4.5]
    assert sigma.tolist() == [pytest.approx(t) for t in ((15 / 12) ** 0.5, 0.5)]


def test_the_common_prefix_ends_at_the_first_leaf_of_another_time_level_or_token() -> None:
    before = context()
    assert before.common_prefix(before.edited([Collapse(6)])) == 6
    assert before.common_prefix(before.edited([Replace(9, (5,))])) == 9
    assert before.common_prefix(before.appended([1, 2])) == 12
    gist = before.edited([Collapse(0, 2)])
    assert gist.common_prefix(gist.edited([Replace(3, (6,))])) == 0
    assert gist.common_prefix(gist.edited([Replace(9, (5,))])) == 6
    assert before.common_prefix(before.edited([Replace(9, (9 % 7,))])) == 12


def test_edits_of_a_batch_that_cancel_change_nothing() -> None:
    before = context()
    after = before.edited([Collapse(4), Replace(0, (5,)), Expand(4), Replace(0, (0,))])
    assert before.common_prefix(after) == 12
    assert not after.changed_leaves(before).numel()


def test_overlapping_edits_change_one_run_of_leaves() -> None:
    before = context()
    after = before.edited([Collapse(4), Collapse(6), Collapse(4, 2), Replace(5, (6,))])
    assert after.changed_leaves(before).tolist() == [4]


def test_a_gist_of_changed_tokens_is_a_changed_leaf() -> None:
    gist = context().edited([Collapse(4, 2)])
    assert gist.edited([Replace(7, (6,))]).changed_leaves(gist).tolist() == [4]
    assert gist.appended([1]).changed_leaves(gist).tolist() == [9]
    assert torch.equal(gist.changed_leaves(context(0)), torch.arange(9))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (Expand(3), "no gist leaf begins at time 3"),
        (Expand(5), "no gist leaf begins at time 5"),
        (Expand(99), "no gist leaf begins at time 99"),
        (Collapse(3), "start at a multiple of 2"),
        (Collapse(4, 2), "no leaves below level 2 tile the 4 tokens from 4 to 8"),
        (Collapse(12), "tile the 2 tokens from 12 to 14 of 12"),
        (Collapse(-2), "tile the 2 tokens from -2"),
        (Replace(11, (1, 2)), "append new ones"),
        (Replace(2**70, (1,)), "append new ones"),
        (Replace(0, (2**70,)), "token: got 1180591620717411303424, want a number from 0 on"),
        (Expand(2**70), "no gist leaf begins at time 1180591620717411303424"),
        (Collapse(2**70), "no leaves below level 1 tile"),
        (Collapse(0, 10**9), r"collapse: level: got 1000000000, want from 1 on, and so small"),
        (Collapse(0, -1), r"collapse: level: got -1, want from 1 on"),
    ],
)
def test_an_edit_that_fits_no_leaf_is_refused_in_words(
    edit: Expand | Collapse | Replace, message: str
) -> None:
    of = context().edited([Collapse(4, 2)])
    with pytest.raises(UserInputError, match=message):
        of.edited([edit])
