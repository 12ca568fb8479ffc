"""The process-wide switches that change what the same code computes.

Float32 precision is read by its newest names (`torch.backends.*.fp32_precision`). They have what
the older switches (`allow_tf32`, `set_float32_matmul_precision`) set, while those cannot be read
any more once somebody has used the newer ones.
"""

import os
import sys
from collections.abc import Callable, Mapping
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch.backends import cuda, cudnn

_BACKENDS: Any = torch.backends
"""Their switches are made at run time, and type checkers see few of them."""
_READ_BY_CUDA = ("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE")
"""Variables by which libraries below PyTorch choose kernels."""
_C: Any = torch._C
"""What `torch.backends` reads its switches by; its properties take three times as long, and these
are read twice a chunk."""
_SMALLEST = sys.float_info.min / 2
"""A denormal number; 0 in arithmetic where a thread flushes them."""
Readers = Mapping[str, Callable[[], object]]


def _fp32(backend: str, operation: str) -> Callable[[], object]:
    return partial(_C._get_fp32_precision_getter, backend, operation)


_EVERYWHERE: Readers = {
    "cpu": _C._get_cpu_capability,
    "threads": torch.get_num_threads,
    "default_dtype": torch.get_default_dtype,
    "fp32": _fp32("generic", "all"),
    "fp32_cpu": _fp32("mkldnn", "all"),
    "fp32_cpu_matmul": _fp32("mkldnn", "matmul"),
    "fp32_cpu_conv": _fp32("mkldnn", "conv"),
    "deterministic": _C._get_deterministic_algorithms,
    "autocast_cpu": partial(torch.is_autocast_enabled, "cpu"),
    "onednn": _C._get_mkldnn_enabled,
    "onednn_deterministic": _C._get_mkldnn_deterministic,
    "denormals": lambda: _SMALLEST * 1.0 > 0,
    "sdp_flash": _C._get_flash_sdp_enabled,
    "sdp_efficient": _C._get_mem_efficient_sdp_enabled,
    "sdp_math": _C._get_math_sdp_enabled,
    "sdp_math_reduction": _C._get_math_sdp_allow_fp16_bf16_reduction,
    "sdp_cudnn": _C._get_cudnn_sdp_enabled,
    "sdp_order": lambda: tuple(_C._get_sdp_priority_order()),
}
"""The switches of attention kernels have `cuda` in their name, and choose those of a CPU too."""
_WITH_CUDA: Readers = {
    "autocast_cuda": lambda: torch.is_autocast_enabled("cuda"),
    "autocast_cuda_dtype": lambda: torch.get_autocast_dtype("cuda"),
    "fp32_cuda_matmul": lambda: cuda.matmul.fp32_precision,
    "fp32_cudnn": lambda: cudnn.fp32_precision,
    "fp32_cudnn_conv": lambda: _BACKENDS.cudnn.conv.fp32_precision,
    "fp16_reduction": lambda: cuda.matmul.allow_fp16_reduced_precision_reduction,
    "fp16_split_k": lambda: cuda.matmul.allow_fp16_reduced_precision_reduction_split_k,
    "fp16_accumulation": lambda: cuda.matmul.allow_fp16_accumulation,
    "bf16_reduction": lambda: cuda.matmul.allow_bf16_reduced_precision_reduction,
    "bf16_split_k": lambda: cuda.matmul.allow_bf16_reduced_precision_reduction_split_k,
    "blas": cuda.preferred_blas_library,
    "cudnn": lambda: cudnn.enabled,
    "cudnn_benchmark": lambda: cudnn.benchmark,
    "cudnn_deterministic": lambda: cudnn.deterministic,
}


def numeric_settings() -> tuple[str, ...]:
    """`name=value` of each; equal settings give equal texts.

    A thread of another autocast mode or default dtype computes otherwise than its process says, so
    ask on the thread that computes.
    """
    settings = _texts(tuple([read() for read in _EVERYWHERE.values()]))
    return settings + cuda_settings() if _has_cuda() else settings


def float32_products() -> tuple[str, ...]:
    """What float32 products are rounded to, `none` and `ieee` not at all: on the CPU, and on a CUDA
    device where there is one."""
    backends = ("mkldnn", "cuda") if _has_cuda() else ("mkldnn",)
    return tuple(str(_fp32(backend, "matmul")()) for backend in backends)


def cuda_settings() -> tuple[str, ...]:
    """Those that hold on a CUDA device alone; `absent` where this PyTorch has no such switch."""
    variables = tuple(f"{name}={os.environ.get(name, '')}" for name in _READ_BY_CUDA)
    return (*_libraries(), *_read(_WITH_CUDA), *variables)


def processor(device: torch.device) -> str:
    """What decides which bits `device` computes: the name of a GPU, what a CPU can do."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.backends.cpu.get_cpu_capability()


@cache
def _has_cuda() -> bool:
    return torch.cuda.is_available()


@lru_cache(maxsize=4)
def _texts(values: tuple[object, ...]) -> tuple[str, ...]:
    return tuple(f"{name}={value}" for name, value in zip(_EVERYWHERE, values, strict=True))


@cache
def _libraries() -> tuple[str, ...]:
    """What never changes in a process: the device and who computes on it."""
    there = torch.cuda.is_available()
    device = torch.cuda.get_device_name().replace(" ", "-") if there else "none"
    return (f"device={device}", f"cuda={torch.version.cuda}", f"cudnn_version={cudnn.version()}")


def _read(readers: Readers) -> tuple[str, ...]:
    return tuple(f"{name}={_value(reader)}" for name, reader in readers.items())


def _value(reader: Callable[[], object]) -> object:
    try:
        return reader()
    except AttributeError:
        return "absent"
