"""The one table between the contract's dtypes and torch's, and what follows from it."""

import hashlib
import zlib
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scope_contracts.tensor_spec import DType, TensorSpec

TORCH_DTYPES = {
    DType.FLOAT64: torch.float64,
    DType.FLOAT32: torch.float32,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
    DType.INT64: torch.int64,
    DType.INT32: torch.int32,
    DType.UINT8: torch.uint8,
    DType.BOOL: torch.bool,
}
_OF_NUMPY = frozenset(TORCH_DTYPES.values()) - {torch.bfloat16}
NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """The spec that announces `tensor` under `name`."""
    (spec,) = specs_of({name: tensor})
    return spec


def specs_of(tensors: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    """The specs of `tensors`, in their order.

    Tensors of the same kind get the very same specs: whoever encoded them knows them again.
    """
    return _specs(
        tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())
    )


@lru_cache(maxsize=64)
def _specs(kinds: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name=name, dtype=NAMES[dtype], shape=shape) for name, dtype, shape in kinds
    )


def specs_by_name(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    """The spec of every tensor under its name."""
    return {spec.name: spec for spec in specs_of(tensors)}


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in C order; its own where it lies so on the CPU, so they change with
    it."""
    if tensor.ndim and tensor.dtype in _OF_NUMPY and tensor.is_contiguous() and tensor.numel():
        return tensor.numpy(force=True).data.cast("B")  # one call of torch, not three
    if not tensor.numel():  # whose stride may be none that can be viewed as bytes
        return memoryview(b"")
    return tensor.reshape(-1).view(torch.uint8).numpy(force=True).data


def of_bytes(data: bytes) -> Tensor:
    """`data` as uint8 `[n]` on the CPU, in memory of its own."""
    if not data:  # which `frombuffer` refuses
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def digest_of(tensor: Tensor) -> str:
    """BLAKE2b of a tensor's bytes, 16 bytes in hexadecimal."""
    return hashlib.blake2b(bytes_of(tensor), digest_size=16).hexdigest()


def sha256_of(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes in hexadecimal: what a chunk's latents are known by."""
    return hashlib.sha256(bytes_of(tensor)).hexdigest()


def crc32_of(frames: NDArray[np.uint8]) -> int:
    """CRC-32 of the numbers of pictures in C order: cheap enough to be taken of every picture."""
    return zlib.crc32(np.ascontiguousarray(frames).data)


def empty(spec: TensorSpec) -> Tensor:
    """CPU memory for what `spec` announces."""
    return torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype])
