"""In bfloat16, weights and what matrices multiply are rounded; what is beside them is not."""

import pytest
import torch

from scope_rt.collectives import SoloCollectives
from scope_rt.models.causal_wan import AllHeadsNorm, CausalWanModel, norm_over_heads
from scope_rt.models.precision import WideLayerNorm, WideLinear, wide
from tests.tiny_folder import CONFIG

HALF_A_UNIT = 2.0**-8
"""Of bfloat16: what rounding once is off by at most, for each number."""


def test_the_norm_of_queries_and_keys_is_rounded_once() -> None:
    """Its scale was rounded first, and the normed number before its weight: up to three times."""
    torch.manual_seed(0)
    norm = AllHeadsNorm(CONFIG.dim)
    norm.weight.data.normal_()
    norm = norm.to(torch.bfloat16)
    x = torch.randn(1, 4000, CONFIG.dim).bfloat16()
    (got,) = norm_over_heads([x], [norm], CONFIG, SoloCollectives())
    scale = (x.double().square().mean(-1, keepdim=True) + CONFIG.eps).rsqrt()
    want = x.double() * scale * norm.weight.double()
    assert got.dtype is torch.bfloat16
    assert ((got - want).abs() <= 1.001 * HALF_A_UNIT * want.abs()).all()


@pytest.mark.parametrize("module", [WideLinear(48, 96), WideLayerNorm(48)])
def test_wide_modules_compute_in_float32(module: torch.nn.Module) -> None:
    module, x = module.to(torch.bfloat16), torch.randn(7, 48).bfloat16()
    got = module(x)
    want = module.float()(x.float())
    assert torch.allclose(got.float(), want.to(got.dtype).float(), rtol=1e-6, atol=1e-6)
    assert wide(x.double()).dtype is torch.float64


def test_modulation_is_float32_at_least() -> None:
    torch.manual_seed(0)
    half = CausalWanModel(CONFIG).requires_grad_(False).to(torch.bfloat16)
    times = torch.tensor([[937.5]], dtype=torch.float64)
    got = half.modulation(times)
    want = half.double().modulation(times)
    assert (got.layers.dtype, got.head.dtype) == (torch.float32, torch.float32)
    assert want.layers.dtype is torch.float64
    assert (got.layers - want.layers).abs().max() < 1e-5
    assert (got.head - want.head).abs().max() < 1e-5
