"""Positions have no end: only the distance between frames matters."""

import pytest
import torch

from scope_rt.models.rope import axis_dims, rotate, rotations
from tests.rounding import gamma

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize("head_dim", [12, 16, 48, 64, 128])
def test_axes_share_a_head(head_dim: int) -> None:
    time, height, width = axis_dims(head_dim)
    assert time + height + width == head_dim
    assert height == width


@pytest.mark.parametrize("frame", [1_023, 1_024, 15_000, 10_000_000])
def test_scores_depend_on_distance_only(frame: int) -> None:
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 4, 1, 48, generator=g)

    def score(first: int) -> torch.Tensor:
        a, b = (
            rotations([f], grid=(2, 2), head_dim=48, dtype=torch.complex64)
            for f in (first, first + 3)
        )
        return (rotate(q, b) * rotate(k, a)).sum(-1)

    # A turned number is a sum of two products with a rounded sine and cosine: three roundings, of
    # q and of k, and the pair of numbers is sqrt(2) times as long; the score adds 48 products.
    rounding = gamma(48 + 9, torch.float32) + (frame + 3) * gamma(4, torch.float64)
    lengths = q.double().norm(dim=-1) * k.double().norm(dim=-1)
    assert ((score(frame) - score(0)).abs() <= 2 * rounding * lengths).all()
