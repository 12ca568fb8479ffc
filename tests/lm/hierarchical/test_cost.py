import random

import pytest

from scope_contracts.errors import UserInputError
from scope_rt.lm.hierarchical.cost import FLAT, CostModel, fitted, speed_up
from scope_rt.lm.hierarchical.hierarchy import Span


def test_the_formula_gives_the_range_that_late_edits_promise() -> None:
    assert speed_up(0.2, 0.0) == pytest.approx(5)
    assert speed_up(0.05, 0.0) == pytest.approx(20)
    assert speed_up(0.05, 1.0) == pytest.approx(1 / (1 - 0.95**2))
    assert speed_up(1.0, 0.3) == pytest.approx(1)
    assert speed_up(0.9, 0.0) < 1.25 < speed_up(0.75, 0.0)


def test_the_formula_is_the_ratio_of_summed_leaf_costs() -> None:
    cost, leaves = CostModel(linear=3.0, quadratic=0.01), 1000
    leaf_costs = [cost.linear + 2 * cost.quadratic * (t + 0.5) for t in range(leaves)]
    for first in (0, 500, 800, 950):
        ratio = sum(leaf_costs) / sum(leaf_costs[first:])
        gain = cost.gain([Span(start=first, end=leaves)], num_leaves=leaves)
        assert gain == pytest.approx(ratio)
        share = cost.quadratic_share(leaves)
        assert gain == pytest.approx(speed_up(1 - first / leaves, share))
    some = [Span(start=300, end=400), Span(start=900, end=1000)]
    ratio = sum(leaf_costs) / (sum(leaf_costs[300:400]) + sum(leaf_costs[900:]))
    assert cost.gain(some, num_leaves=leaves) == pytest.approx(ratio)
    assert cost.gain([], num_leaves=leaves) == float("inf")


def test_the_fit_finds_the_cost_and_ignores_disturbed_chunks() -> None:
    cost, noise = CostModel(linear=2.0, quadratic=0.003), random.Random(1)
    depths = [50.0 + 100 * n for n in range(40)]
    seconds = [(2.0 + 0.006 * depth) * noise.uniform(0.99, 1.01) for depth in depths]
    for disturbed in (3, 17, 30):
        seconds[disturbed] *= 10
    found = fitted(depths, seconds)
    assert found.quadratic_share(4000) == pytest.approx(cost.quadratic_share(4000), rel=0.03)
    flat = fitted(depths, [5.0 - 1e-6 * depth for depth in depths])
    assert flat.quadratic_share(4000) == FLAT.quadratic_share(4000) == 0
    assert fitted([0.0, 10.0, 20.0], [-1.0, 9.0, 19.0]).quadratic_share(20) == 1


def test_a_fit_needs_two_depths() -> None:
    with pytest.raises(UserInputError, match="measured depths: got 1, want at least 2"):
        fitted([4.0, 4.0], [1.0, 1.0])
