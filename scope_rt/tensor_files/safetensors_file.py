"""A safetensors file: what lies where in it, and any slice of it on demand.

`safe_open` checks a file's header. The bytes are read by plain reads into the tensor that keeps
them: what `safe_open` hands out is a view of the whole mapped file, whose pages count as this
process's memory until the file is closed.
"""

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from scope_contracts.errors import UserInputError

DTYPES = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)
"""The names of the file format."""
_FLOATS = tuple(name for name, dtype in DTYPES.items() if dtype.is_floating_point)
_HEADER_LENGTH_BYTES = 8
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A whole tensor in a file; `offset` is its first byte, counted from the file's beginning."""

    path: Path
    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        """The tensor, in the dtype of the file, on the CPU; raises what `TensorReader` does."""
        with TensorReader(self.path) as reader:
            return reader.read(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Part number `index` of `num_parts` equal parts along `axis`."""

    axis: int
    index: int
    num_parts: int


WHOLE = Shard(axis=0, index=0, num_parts=1)


class TensorReader:
    """An open file of weights; each byte of a tensor is read when it is asked for, and only then.

    Raises:
        UserInputError: the file cannot be read, or has become shorter.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = FileIO(path)
        except OSError as error:
            raise UserInputError(f"cannot read {path}: {error.strerror}") from error

    def read(self, tensor: StoredTensor, shard: Shard = WHOLE) -> Tensor:
        """The part of `tensor` that `shard` names, in the dtype of the file, on the CPU."""
        shape = list(tensor.shape)
        if shard.num_parts > 1:
            shape[shard.axis] //= shard.num_parts
        part = torch.empty(prod(shape) * tensor.dtype.itemsize, dtype=torch.uint8)
        num_runs = prod(shape[: shard.axis])
        run_bytes = len(part) // num_runs
        start, view = tensor.offset + shard.index * run_bytes, part.numpy().data
        for run in range(num_runs):
            run_start = start + run * run_bytes * shard.num_parts
            self.fill(view[run * run_bytes : (run + 1) * run_bytes], run_start)
        return part.view(tensor.dtype).view(shape)

    def fill(self, target: memoryview, offset: int) -> None:
        """Read `len(target)` bytes from `offset` on."""
        try:
            self._file.seek(offset)
            while len(target):
                num_bytes = self._file.readinto(target)
                if not num_bytes:
                    raise UserInputError(f"{self.path} became shorter; copy the file again")
                target = target[num_bytes:]
        except OSError as error:
            raise UserInputError(f"cannot read {self.path}: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()


def tensors_of(path: Path, *, wanted: Collection[str] = _FLOATS) -> Iterator[StoredTensor]:
    """The tensors of one file, in the order of their bytes: the format leaves no gap between.

    Args:
        wanted: dtypes, as the format calls them; any other is refused.

    Raises:
        UserInputError: the file cannot be read, or has a tensor of another dtype.
    """
    try:
        with path.open("rb") as raw, safe_open(path, "pt") as file:
            header_bytes = int.from_bytes(raw.read(_HEADER_LENGTH_BYTES), "little")
            offset = _HEADER_LENGTH_BYTES + header_bytes
            for name in file.offset_keys():
                header = file.get_slice(name)
                if header.get_dtype() not in wanted:
                    raise UserInputError(
                        f"{path}: weight {name} is {header.get_dtype()}, want one of "
                        f"{', '.join(wanted)}; copy the checkpoint's own file"
                    )
                tensor = StoredTensor(
                    path=path,
                    name=name,
                    offset=offset,
                    shape=tuple(header.get_shape()),
                    dtype=DTYPES[header.get_dtype()],
                )
                offset += tensor.num_bytes
                yield tensor
    except (SafetensorError, OSError) as error:
        if _is_lfs_pointer(path):
            raise UserInputError(
                f"{path} is a pointer of Git LFS, not the weights; fetch them with `git lfs pull`"
            ) from error
        raise UserInputError(f"cannot read {path}: {error}; copy the file again") from error


def _is_lfs_pointer(path: Path) -> bool:
    """Whether a clone without Git LFS left its small text file in place of the weights."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(len(_LFS_POINTER)) == _LFS_POINTER
    return False
