"""A tensor on the link is described by name, dtype and shape before its first byte is sent."""

import math
from dataclasses import dataclass
from enum import StrEnum

from scope_contracts.errors import FieldError, mismatch


class DType(StrEnum):
    """The dtypes a tensor may have on the link; values are the names torch and numpy use."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT64 = "int64"
    INT32 = "int32"
    UINT8 = "uint8"
    BOOL = "bool"

    @property
    def num_bytes(self) -> int:
        """Bytes of one element."""
        return _ELEMENT_BYTES[self]


_ELEMENT_BYTES = {
    DType.FLOAT64: 8,
    DType.FLOAT32: 4,
    DType.FLOAT16: 2,
    DType.BFLOAT16: 2,
    DType.INT64: 8,
    DType.INT32: 4,
    DType.UINT8: 1,
    DType.BOOL: 1,
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype and shape of one contiguous tensor.

    `dtype` may be given as a string and is kept as a `DType`; any other name is a `FieldError`.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        try:
            dtype = DType(self.dtype)
        except ValueError as error:
            want = f"one of {', '.join(DType)}"
            raise FieldError(mismatch(f"{self.name}.dtype", got=self.dtype, want=want)) from error
        object.__setattr__(self, "dtype", dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor, contiguous."""
        return math.prod(self.shape) * self.dtype.num_bytes
