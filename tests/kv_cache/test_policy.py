import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scope_contracts.errors import UserInputError
from scope_rt.kv_cache.policy import EvictionPolicy, HeavyHitters, RandomRows, sliding_window

SIZES = HeavyHitters(budget=2, num_sink=1, num_recent=2)


def rows(policy: EvictionPolicy, score: list[float], positions: list[int] | None = None) -> object:
    at = None if positions is None else torch.tensor(positions)
    return policy.kept(torch.tensor(score), at).tolist()


def test_sinks_and_recent_stay_and_the_middle_is_the_best_in_order() -> None:
    assert rows(SIZES, [0, 5, 1, 7, 3, 9, 0, 0]) == [0, 3, 5, 6, 7]


def test_of_equal_scores_the_older_row_stays() -> None:
    assert rows(SIZES, [0, 4, 4, 4, 4, 0, 0]) == [0, 1, 2, 5, 6]


def test_no_score_outbids_a_sink_or_a_recent_row() -> None:
    infinite = float("inf")
    assert rows(SIZES, [-1, infinite, infinite, infinite, -1, -1]) == [0, 1, 2, 4, 5]


def test_up_to_capacity_every_row_stays() -> None:
    for count in range(SIZES.capacity + 1):
        assert rows(SIZES, [0.0] * count) == list(range(count))


def test_padding_is_no_sink_and_never_stays_before_a_real_row() -> None:
    assert rows(SIZES, [9, 9, 0, 1, 3, 2, 0, 0], [-1, -1, 0, 1, 2, 3, 4, 5]) == [2, 4, 5, 6, 7]
    # Four real rows: the fifth place falls to padding, so that a batch stays rectangular.
    assert rows(SIZES, [9, 9, 9, 0, 0, 0, 0], [-1, -1, -1, 0, 1, 2, 3]) == [0, 3, 4, 5, 6]


def test_age_comes_from_positions_where_rows_lie_in_another_order() -> None:
    """As a ring has them: row 2 is the sink, rows 0 and 5 the newest."""
    assert rows(SIZES, [0, 6, 0, 2, 4, 0], [9, 5, 0, 6, 7, 8]) == [0, 1, 2, 4, 5]


def test_where_fewer_may_stay_sinks_come_first_then_the_newest_then_the_best() -> None:
    score = torch.tensor([0, 5, 1, 7, 3, 9, 0, 0])
    assert SIZES.ranked(score).tolist() == [0, 7, 6, 5, 3, 1, 4, 2]
    two_sinks = HeavyHitters(budget=2, num_sink=2, num_recent=2)
    assert two_sinks.ranked(score).tolist() == [0, 1, 7, 6, 5, 3, 4, 2]


def test_a_window_keeps_sinks_and_recent_alone() -> None:
    window = sliding_window(num_recent=2, num_sink=1)
    assert rows(window, [0, 9, 9, 9, 0, 0]) == [0, 4, 5]


def test_random_rows_follow_from_position_and_seed_alone() -> None:
    policy = RandomRows(sizes=HeavyHitters(budget=40, num_sink=2, num_recent=3), seed=5)
    first, second = torch.zeros(2, 100), torch.rand(2, 100)
    assert torch.equal(policy.kept(first), policy.kept(second))
    kept = policy.kept(first)[0]
    assert set(kept.tolist()) >= {0, 1, 97, 98, 99}
    other = RandomRows(sizes=policy.sizes, seed=6).kept(first)[0]
    assert not torch.equal(kept, other)
    # A row keeps its lot: what is dropped in two rounds is what is dropped in one.
    at = policy.kept(torch.zeros(97), torch.arange(97))
    again = torch.cat([at, torch.arange(97, 100)])
    assert again[policy.kept(torch.zeros(again.shape), again)].tolist() == kept.tolist()


def test_the_peak_is_the_capacity_and_the_rows_until_the_next_eviction() -> None:
    policy = HeavyHitters(budget=2, num_sink=1, num_recent=2, evict_every=4)
    assert (policy.capacity, policy.peak) == (5, 8)
    assert [policy.due(step) for step in range(6)] == [True, False, False, False, True, False]


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"budget": -1}, "budget"),
        ({"num_sink": -1}, "num_sink"),
        ({"num_recent": -2}, "num_recent"),
        ({"evict_every": 0}, "evict_every"),
        ({"budget": 0, "num_sink": 0, "num_recent": 0}, "raise num_recent"),
    ],
)
def test_sizes_that_keep_nothing_are_refused_with_the_remedy(
    sizes: dict[str, int], named: str
) -> None:
    with pytest.raises(UserInputError, match=named):
        HeavyHitters(**({"budget": 1, "num_sink": 1, "num_recent": 1} | sizes))


def expected(policy: HeavyHitters, score: list[int], positions: list[int]) -> list[int]:
    """The definition, on lists."""
    ages = sorted(range(len(score)), key=lambda row: (positions[row], row))
    real = [row for row in ages if positions[row] >= 0]
    end = max(len(real) - policy.num_recent, 0)
    sinks, recent = real[: policy.num_sink], real[max(end, policy.num_sink) :]
    middle = sorted(real[policy.num_sink : end], key=lambda row: -score[row])  # stable: older first
    kept = sinks + recent + middle[: policy.budget]
    padding = [row for row in ages if positions[row] < 0]
    padding.sort(key=lambda row: -score[row])
    return sorted(kept + padding[: max(min(policy.capacity, len(score)) - len(kept), 0)])


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_rows_any_order_any_padding_give_what_the_definition_says(data: st.DataObject) -> None:
    small = st.integers(0, 4)
    budget, num_sink, num_recent = data.draw(st.tuples(small, small, small).filter(any))
    policy = HeavyHitters(budget=budget, num_sink=num_sink, num_recent=num_recent)
    count = data.draw(st.integers(1, 14))
    positions = data.draw(st.permutations(range(count)))
    padded = data.draw(st.integers(0, count))
    positions = [position if position >= padded else -1 for position in positions]
    score = data.draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    got: Tensor = policy.kept(torch.tensor(score), torch.tensor(positions))
    assert got.tolist() == expected(policy, score, positions)
    batched = policy.kept(torch.tensor([score] * 2), torch.tensor(positions))
    assert batched.tolist() == [got.tolist()] * 2
