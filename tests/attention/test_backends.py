"""All backends agree with the dense float64 reference, on every view and at every bias."""

import math
import sys
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from scope_contracts.errors import UserInputError
from scope_rt.attention import backend as backend_module
from scope_rt.attention.backend import backend_named, default_backend
from scope_rt.attention.key_bias import BiasRun, KeyBias
from scope_rt.attention.lse_merge import LseMerge, attend_by_runs
from scope_rt.attention.reference import DenseReference
from tests.attention.matrix import (
    BIASES,
    EVERY_CPU_BACKEND,
    FRAME_TOKENS,
    QKV,
    VIEWS,
    bias_of,
    qkv,
)
from tests.rounding import FP64_CONTRACT, attention_bound
from tests.tiny_models import CPU, Rollout

pytestmark = pytest.mark.numeric

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
every_backend = pytest.mark.parametrize("name", EVERY_CPU_BACKEND)
every_view = pytest.mark.parametrize("view", list(VIEWS))


def reference(tensors: QKV, bias: KeyBias | None) -> Tensor:
    q, k, v = (x.double() for x in tensors)
    return DenseReference().attend(q, k, v, bias)


def allowed(name: str, tensors: QKV, bias: KeyBias | None) -> Tensor:
    """What rounding may take from the backend, number by number."""
    q = tensors[0]
    log_bias_K = None if bias is None else bias.vector(CPU, torch.float64)
    if log_bias_K is not None and name == "lse_merge":
        log_bias_K -= log_bias_K.max()  # a merge drops what all keys share
    return attention_bound(*tensors, log_bias_K, scores_in=q.dtype if name == "flex" else None)


def excess(name: str, tensors: QKV, bias: KeyBias | None) -> float:
    """Largest difference from the reference, in parts of what rounding explains."""
    got = backend_named(name).attend(*tensors, bias)
    assert got.dtype is tensors[0].dtype
    off = (got - reference(tensors, bias)).abs()
    return (off / allowed(name, tensors, bias)).max().item()


@every_backend
@every_view
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_backend_equals_the_reference(
    name: str, view: str, bias: float, dtype: torch.dtype
) -> None:
    frames = VIEWS[view]
    tensors = qkv(len(frames) * FRAME_TOKENS, dtype)
    assert excess(name, tensors, bias_of(frames, bias)) <= 1


@every_backend
@pytest.mark.parametrize("num_keys", [1, 63, 65, 127, 129, 193])
@pytest.mark.parametrize("biased", [False, True])
def test_no_padding_key_steals_softmax_mass(name: str, num_keys: int, biased: bool) -> None:
    """Every true score is about -20: a key of zeros, scored 0, would take all of the mass."""
    q = torch.ones(1, 33, 4, 16)
    k = torch.full((1, num_keys, 4, 16), -5.0) + 0.1 * torch.randn(1, num_keys, 4, 16)
    v = torch.ones(1, num_keys, 4, 16)
    runs = (BiasRun(num_keys // 2, math.log(0.3)), BiasRun(num_keys - num_keys // 2, 0.0))
    bias = KeyBias(tuple(run for run in runs if run.num_tokens)) if biased else None
    off = (backend_named(name).attend(q, k, v, bias) - 1).abs()
    assert (off / allowed(name, (q, k, v), bias)).max() <= 1


@every_backend
@pytest.mark.parametrize(
    "log_biases", [(-69.0,), (-69.0, -69.5), (-69.0, 0.0, -0.1), (-800.0, 0.0)]
)
def test_tiny_biases_stay_finite_and_exact(name: str, log_biases: tuple[float, ...]) -> None:
    """Where all keys are biased, what they share costs a sum its low digits; a merge drops it."""
    bias = KeyBias(tuple(BiasRun(37, log_bias) for log_bias in log_biases))
    assert excess(name, qkv(bias.num_tokens, torch.float32), bias) <= 1


@every_backend
def test_half_precision_does_not_round_the_bias(name: str) -> None:
    """In bfloat16 -13.78 is -13.8125, which would weigh the biased keys 3 % less."""
    q, k, v = (torch.zeros_like(x) for x in qkv(66, torch.bfloat16))
    v[:, :33] = 1
    bias = KeyBias((BiasRun(33, -13.78), BiasRun(33, 0.0)))
    got = backend_named(name).attend(q, k, v, bias).mean().item()
    assert got == pytest.approx(math.exp(-13.78), rel=0.01)


@every_backend
def test_runs_without_a_bias_equal_no_bias(name: str) -> None:
    tensors = qkv(99, torch.float32)
    zero = KeyBias((BiasRun(44, 0.0), BiasRun(55, 0.0)))
    backend = backend_named(name)
    off = (backend.attend(*tensors, zero) - backend.attend(*tensors, None)).abs()
    assert (off / (2 * allowed(name, tensors, None))).max() <= 1, "each rounds in its own way"


@every_backend
def test_a_bias_that_does_not_cover_the_keys_is_refused(name: str) -> None:
    with pytest.raises((RuntimeError, IndexError)):
        backend_named(name).attend(*qkv(99, torch.float32), KeyBias((BiasRun(98, -1.0),)))


@every_backend
def test_rows_that_are_not_dense_are_read_right(name: str) -> None:
    q, k, v = (torch.cat([x, x + 1], -1)[..., ::2] for x in qkv(66, torch.float32))
    assert excess(name, (q, k, v), KeyBias((BiasRun(60, -1.0), BiasRun(6, 0.0)))) <= 1


@every_backend
@pytest.mark.parametrize("view", [name for name, frames in VIEWS.items() if len(frames) > 6])
def test_a_bias_on_the_wrong_frames_is_seen(name: str, view: str) -> None:
    """Slots taken for frames in order of time: the mistake that a ring invites."""
    frames = VIEWS[view]
    tensors = qkv(len(frames) * FRAME_TOKENS, torch.float32)
    wrong = bias_of(tuple(sorted(frames)), 0.3)
    got = backend_named(name).attend(*tensors, wrong)
    right = bias_of(frames, 0.3)
    off = (got - reference(tensors, right)).abs()
    assert (off / allowed(name, tensors, right)).max() > 100


class Kernels(TorchDispatchMode):
    """Names of the attention kernels that ran."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if "attention" in func.__name__:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["sdpa", "lse_merge"])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_bias_switches_the_kernel_family(name: str, bias: float, dtype: torch.dtype) -> None:
    frames = VIEWS["sinks"]
    with Kernels() as kernels:
        tensors = qkv(len(frames) * FRAME_TOKENS, dtype)
        backend_named(name).attend(*tensors, bias_of(frames, bias))
    assert set(kernels.names) == {"_scaled_dot_product_flash_attention_for_cpu.default"}


@pytest.mark.parametrize(
    ("dtype", "kernel"),
    [
        (torch.bfloat16, "_scaled_dot_product_flash_attention.default"),
        (torch.float32, "_scaled_dot_product_efficient_attention.default"),
    ],
)
def test_lse_merge_calls_one_cuda_kernel_per_run(dtype: torch.dtype, kernel: str) -> None:
    """On tensors without data: that the calls and shapes fit, not that the numbers do."""
    with FakeTensorMode(), Kernels() as kernels:
        q, k, v = (torch.empty(1, n, 4, 16, device="cuda", dtype=dtype) for n in (33, 99, 99))
        out = LseMerge().attend(q, k, v, bias_of(VIEWS["full, chunk amid the ring"], 0.3))
        assert (out.shape, out.dtype) == (q.shape, dtype)
    assert kernels.names == [kernel] * 3


def test_lse_merge_refuses_a_dtype_without_a_cuda_kernel() -> None:
    with FakeTensorMode():
        q = torch.empty(1, 33, 4, 16, device="cuda", dtype=torch.float64)
        with pytest.raises(UserInputError, match=r"float64 on cuda.*choose sdpa"):
            LseMerge().attend(q, q, q, None)


def test_half_precision_runs_are_merged_in_full_precision() -> None:
    """The kernel's own rounding aside, a merge of eleven runs adds one rounding and no more."""

    def rounded(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        ones = torch.full_like(q, 1.0)
        return ones, torch.zeros(q.shape[0], q.shape[2], q.shape[1])

    tensors = qkv(99, torch.bfloat16)
    runs = tuple(BiasRun(9, -0.2 * run) for run in range(11))
    assert torch.equal(
        attend_by_runs(rounded, *tensors, KeyBias(runs)), torch.ones_like(tensors[0])
    )


def test_bias_of_a_stream_changes_only_what_attends_to_the_past() -> None:
    plain, biased = (Rollout(0, 9).run(range(3), bias=bias) for bias in (1.0, 0.3))
    assert torch.equal(plain[0], biased[0])
    assert (plain[2] - biased[2]).abs().max() > 1e-4
    for name in ("reference", "lse_merge"):
        other = Rollout(0, 9, backend=name).run(range(3), bias=0.3)
        assert (other[2] - biased[2]).abs().max() <= FP64_CONTRACT


def test_unknown_backend_is_named() -> None:
    with pytest.raises(UserInputError, match="choose one of sdpa, lse_merge, flash, flex, ref"):
        backend_named("fa9")


def test_missing_flash_attn_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(UserInputError, match=r"pip install 'scope-rt\[flash-attn\]'"):
        backend_named("flash")


@pytest.mark.parametrize(
    ("device", "dtype", "installed", "name"),
    [
        ("cpu", torch.float32, True, "sdpa"),
        ("cuda", torch.bfloat16, True, "flash"),
        ("cuda", torch.bfloat16, False, "lse_merge"),
        ("cuda", torch.float32, True, "lse_merge"),
    ],
)
def test_default_backend_follows_from_device_dtype_and_package(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, installed: bool, name: str
) -> None:
    found = object() if installed else None
    monkeypatch.setattr(backend_module, "find_spec", lambda package: found)
    assert default_backend(torch.device(device), dtype) == name
