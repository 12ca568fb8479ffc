"""The CUDA kernels agree with the dense float64 reference, and a bias chooses no other one."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from scope_rt.attention.backend import backend_named
from scope_rt.attention.reference import DenseReference
from tests.attention.matrix import BIASES, EVERY_BACKEND, FRAME_TOKENS, VIEWS, bias_of, qkv
from tests.gpu.conftest import NEEDS_GPU
from tests.rounding import attention_bound

pytestmark = NEEDS_GPU
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("name", EVERY_BACKEND)
@pytest.mark.parametrize("view", list(VIEWS))
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_backend_equals_the_reference(
    name: str, view: str, bias: float, dtype: torch.dtype
) -> None:
    if name == "flash" and dtype is torch.float32:
        pytest.skip("flash-attn has no float32 kernel")
    frames = VIEWS[view]
    q, k, v = qkv(len(frames) * FRAME_TOKENS, dtype, device="cuda")
    runs = bias_of(frames, bias)
    want = DenseReference().attend(q.double(), k.double(), v.double(), runs)
    got = backend_named(name).attend(q, k, v, runs)
    log_bias_K = None if runs is None else runs.vector(q.device, torch.float64)
    # sdpa's kernel takes the bias in the dtype of q.
    allowed = attention_bound(q, k, v, log_bias_K, scores_in=dtype if name == "sdpa" else None)
    assert ((got - want).abs() / allowed).max() <= 1


@pytest.mark.parametrize("name", [p for p in EVERY_BACKEND if p.values[0] != "reference"])
def test_no_bias_switches_the_kernel_family(name: str) -> None:
    frames = VIEWS["sinks"]
    q, k, v = qkv(len(frames) * FRAME_TOKENS, torch.bfloat16, device="cuda")
    backend = backend_named(name)
    families = []
    for bias in BIASES:
        backend.attend(q, k, v, bias_of(frames, bias))  # compiles, where anything compiles
        with profile(activities=[ProfilerActivity.CPU]) as ran:
            backend.attend(q, k, v, bias_of(frames, bias))
        families.append({e.key for e in ran.key_averages() if "attention" in e.key})
    assert families == [families[0]] * len(BIASES)
