"""The one table between the contract's dtypes and torch's."""

from collections.abc import Mapping

import torch
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
NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """The spec that announces `tensor` under `name`."""
    return TensorSpec(name=name, dtype=NAMES[tensor.dtype], shape=tuple(tensor.shape))


def specs_of(tensors: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    """The specs of `tensors`, in their order."""
    return tuple(spec_of(name, tensor) for name, tensor in tensors.items())


def empty(spec: TensorSpec) -> Tensor:
    """CPU memory for what `spec` announces."""
    return torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype])
