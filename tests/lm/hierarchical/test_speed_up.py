"""At 16,000 leaves an edit costs what the formula promises: work is counted, nothing is timed."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from scope_contracts.row_format import RowFormat
from scope_contracts.tensor_spec import DType
from scope_rt.lm.hierarchical.cache import HierarchicalCache
from scope_rt.lm.hierarchical.calibration import calibrate
from scope_rt.lm.hierarchical.context import Replace, WorkingContext
from scope_rt.lm.hierarchical.cost import speed_up
from scope_rt.lm.hierarchical.editing import EditableContext
from scope_rt.lm.hierarchical.hierarchy import Hierarchy
from scope_rt.lm.hierarchical.node_model import CachedNodeAttention, NodeAttention

LEAVES, CHUNK = 16_000, 160
FRACTIONS = (0.5, 0.2, 0.1, 0.05)
LEAST = {0.1: 5, 0.05: 10}
"""Promised speed-ups by dirty fraction where no cost grows with depth."""
TOLERANCE = 0.05
"""Of the formula; 25% are promised, which leave the rest to what a clock adds."""


class CountedWork:
    """A model that writes zeros, and counts nodes and the keys that these see."""

    vocab_size, num_levels = 2, 3

    def __init__(self, *, work_a_key: float) -> None:
        self.work_a_key, self.work = work_a_key, 0.0

    def __call__(
        self, context: WorkingContext, nodes: Sequence[range], attend: NodeAttention
    ) -> Tensor:
        assert isinstance(attend, CachedNodeAttention)
        rows = torch.zeros(1, sum(map(len, nodes)), 1, 1)
        attend.cache.append(0, rows, rows)
        self.work += rows.shape[1] + self.work_a_key * int((attend.hidden_keys == 0).sum())
        return rows[0, :, 0]


def filled(model: CountedWork, hierarchy: Hierarchy) -> EditableContext:
    cache = HierarchicalCache(
        RowFormat.full(heads=1, head_dim=1, dtype=DType.FLOAT32),
        hierarchy,
        num_layers=1,
        max_leaves=LEAVES,
        device=torch.device("cpu"),
    )
    made = EditableContext(model, cache, chunk_leaves=CHUNK, bit_equal=True)
    made.append([0] * LEAVES)
    return made


@pytest.mark.parametrize(
    ("windows", "work_a_key", "share"),
    [
        pytest.param((256, 64, None), 0.0, 0.0, id="windows"),
        pytest.param((None, 32, None), 2 / LEAVES, 0.5, id="full attention", marks=pytest.mark.lab),
    ],
)
def test_an_edit_costs_what_the_formula_says(
    windows: tuple[int | None, ...], work_a_key: float, share: float
) -> None:
    model = CountedWork(work_a_key=work_a_key)
    made = filled(model, Hierarchy(group=32, windows=windows))
    full_work = model.work
    cost = calibrate(made, [], clock=lambda: model.work)
    assert cost.quadratic_share(LEAVES) == pytest.approx(share, abs=0.02)
    for fraction in FRACTIONS:
        before, start = model.work, round((1 - fraction) * LEAVES)
        report = made.edit([Replace(start, (1,))])
        assert not report.full_recompute
        gain = full_work / (model.work - before)
        assert gain == pytest.approx(speed_up(fraction, share), rel=TOLERANCE)
        assert report.predicted_gain == pytest.approx(gain, rel=TOLERANCE)
        assert share or gain >= LEAST.get(fraction, 1)
