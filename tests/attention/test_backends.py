"""All backends agree with the dense float64 reference, with and without bias."""

import pytest
import torch
from torch import Tensor

from scope_contracts.errors import UserInputError
from scope_rt.attention.backend import BACKENDS, backend_named, key_log_bias
from scope_rt.attention.reference import DenseReference
from tests.tiny_models import CPU, Rollout

VIEW = (6, 7, 2, 3, 4, 5)
"""Frames 2..7 as a ring holds them; 5, 6 and 7 are current."""


def bias_of(bias: float) -> Tensor | None:
    return key_log_bias(VIEW, num_current=3, frame_tokens=4, bias=bias, device=CPU)


def qkv(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = ((2, 12, 4, 16), (2, 24, 4, 16), (2, 24, 4, 16))
    q, k, v = (torch.randn(shape, generator=g).to(dtype) for shape in shapes)
    return q, k, v


@pytest.mark.parametrize("bias", [1.0, 0.7, 0.1, 1e-3])
@pytest.mark.parametrize("name", list(BACKENDS))
@pytest.mark.parametrize(("dtype", "bar"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_backend_equals_the_reference(
    name: str, bias: float, dtype: torch.dtype, bar: float
) -> None:
    q, k, v = qkv(dtype)
    want = DenseReference().attend(q.double(), k.double(), v.double(), bias_of(bias))
    got = backend_named(name).attend(q, k, v, bias_of(bias))
    assert got.dtype is dtype
    assert (got - want).abs().max() <= bar


def test_bias_exempts_the_oldest_frame_and_the_current_chunk() -> None:
    bias = bias_of(0.5)
    assert bias is not None
    by_frame = dict(zip(VIEW, bias.view(6, 4).exp().mean(1).tolist(), strict=True))
    assert by_frame == pytest.approx({2: 1, 3: 0.5, 4: 0.5, 5: 1, 6: 1, 7: 1})


def test_a_bias_of_one_changes_nothing() -> None:
    assert bias_of(1.0) is None


def test_bias_of_a_stream_changes_only_what_attends_to_the_past() -> None:
    plain, biased = (Rollout(0, 9).run(range(3), bias=bias) for bias in (1.0, 0.3))
    assert torch.equal(plain[0], biased[0])
    assert (plain[2] - biased[2]).abs().max() > 1e-4
    reference = Rollout(0, 9, backend="reference").run(range(3), bias=0.3)
    assert (reference[2] - biased[2]).abs().max() <= 1e-10


def test_unknown_backend_is_named() -> None:
    with pytest.raises(UserInputError, match="choose one of sdpa, reference"):
        backend_named("fa9")
