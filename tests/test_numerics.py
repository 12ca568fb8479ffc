"""Every switch that changes what code computes is among the settings that ranks compare."""

import sys

import pytest
import torch

from scope_contracts.parity import ScalarDigest
from scope_rt.mesh.peer_check import PeerReport
from scope_rt.mesh.transfers import EXCHANGE_BYTES
from scope_rt.numerics import cuda_settings, numeric_settings
from tests import warm_python
from tests.mesh.test_peer_check import DIGEST

SWITCHES = {
    "fp32_cpu_matmul": "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
    "fp32_cpu_conv": "torch.backends.mkldnn.conv.fp32_precision = 'bf16'",
    "default_dtype": "torch.set_default_dtype(torch.float64)",
    "deterministic": "torch.use_deterministic_algorithms(True)",
    "threads": "torch.set_num_threads(torch.get_num_threads() + 1)",
    "autocast_cpu": "torch.set_autocast_enabled('cpu', True)",
    "autocast_cuda": "torch.set_autocast_enabled('cuda', True)",
    "fp32_cuda_matmul": "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "fp32_cudnn_conv": "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
    "fp16_reduction": "cuda.matmul.allow_fp16_reduced_precision_reduction = False",
    "fp16_split_k": "cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)",
    "fp16_accumulation": "cuda.matmul.allow_fp16_accumulation = True",
    "bf16_reduction": "cuda.matmul.allow_bf16_reduced_precision_reduction = False",
    "bf16_split_k": "cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)",
    "sdp_flash": "cuda.enable_flash_sdp(False)",
    "sdp_efficient": "cuda.enable_mem_efficient_sdp(False)",
    "sdp_math": "cuda.enable_math_sdp(False)",
    "sdp_math_reduction": "cuda.allow_fp16_bf16_reduction_math_sdp(True)",
    "sdp_cudnn": "cuda.enable_cudnn_sdp(False)",
    "cudnn": "torch.backends.cudnn.enabled = False",
    "cudnn_benchmark": "torch.backends.cudnn.benchmark = True",
    "cudnn_deterministic": "torch.backends.cudnn.deterministic = True",
    "CUBLAS_WORKSPACE_CONFIG": "os.environ['CUBLAS_WORKSPACE_CONFIG'] = ':4096:8'",
    "fp32": "torch.backends.fp32_precision = 'ieee'",
    "sdp_order": "torch._C._set_sdp_priority_order([2, 1, 0, 3, 4])",
    "denormals": "torch.set_flush_denormal(True)",
}
"""What changes each setting; a process of its own does it, which leaves the tests' as they are."""
OLDER_NAMES = {
    "torch.set_float32_matmul_precision('medium')": {"fp32_cpu_matmul", "fp32_cuda_matmul"},
    "cuda.matmul.allow_tf32 = False": {"fp32_cuda_matmul"},
    "torch.backends.cudnn.allow_tf32 = False": {"fp32_cudnn_conv"},
}
CHANGES = """
import os, sys, torch
from torch.backends import cuda
from scope_rt.numerics import cuda_settings, numeric_settings

def settings():
    return dict(each.split("=", 1) for each in (*numeric_settings(), *cuda_settings()))

for statement in sys.argv[1:]:
    before = settings()
    exec(statement)
    after = settings()
    print(*(name for name in before if before[name] != after[name]), sep=",")
"""


def changed_by(*statements: str) -> list[set[str]]:
    """The settings that each of `statements` changes, one after another in one process."""
    command = [sys.executable, "-c", CHANGES, *statements]
    told = warm_python.run(command, timeout=60)
    assert told.returncode == 0, told.stderr
    return [set(line.split(",")) for line in told.stdout.splitlines()]


def test_every_switch_is_among_the_settings_once_it_is_changed() -> None:
    for name, changed in zip(SWITCHES, changed_by(*SWITCHES.values()), strict=True):
        assert name in changed, (name, changed)


def test_a_switch_of_an_older_name_changes_the_setting_of_the_newest_name() -> None:
    for want, changed in zip(OLDER_NAMES.values(), changed_by(*OLDER_NAMES), strict=True):
        assert want <= changed, (want, changed)


PRODUCTS = {
    "pass": 2.0**-24,
    "torch.backends.fp32_precision = 'tf32'": 2.0**-11,
    "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'": 2.0**-8,
    "torch.set_float32_matmul_precision('high')": 2.0**-11,
    "torch.backends.cuda.matmul.fp32_precision = 'ieee'": 2.0**-24,
}
"""After each of these alone, what a product of float32 on the CPU may be off by."""
ROUNDED = """
import sys, torch
from scope_rt.integrity.tolerance import Rounding
exec(sys.argv[1])
print(Rounding.of(torch.float32).work)
"""


@pytest.mark.parametrize("statement", PRODUCTS)
def test_arithmetic_is_verified_as_it_is_set_by_whatever_name(statement: str) -> None:
    command = [sys.executable, "-c", ROUNDED, statement]
    told = warm_python.run(command, timeout=60)
    assert told.returncode == 0, told.stderr
    assert float(told.stdout) == PRODUCTS[statement]


def test_no_switch_is_absent_from_this_pytorch() -> None:
    assert "absent" not in " ".join((*numeric_settings(), *cuda_settings()))


def test_a_report_with_the_settings_of_a_gpu_fits_one_gather() -> None:
    digest: ScalarDigest = DIGEST
    numerics = (*numeric_settings(), *cuda_settings(), "device=" + 40 * "x")
    report = PeerReport(digest=digest, busy_ms=1.0, numerics=numerics)
    assert len(report.encode()) < EXCHANGE_BYTES // 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_settings_of_a_gpu_are_compared_where_one_is() -> None:
    assert set(cuda_settings()) < set(numeric_settings())
