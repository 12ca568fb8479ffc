"""A tensor that lies in a file as it is: any slice of it is read on demand, and nothing else.

The bytes are read by plain reads into the tensor that keeps them. Those of a mapped file would
count as this process's memory until the file is closed, and would end it where the file became
shorter.
"""

from dataclasses import dataclass
from io import FileIO
from math import prod
from os import preadv
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from scope_contracts.errors import UserInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Part number `index` of `num_parts` equal parts along `axis`."""

    axis: int
    index: int
    num_parts: int

    def of(self, tensor: Tensor) -> Tensor:
        """The part of `tensor`: a view of it."""
        if self.num_parts == 1:
            return tensor
        return tensor.chunk(self.num_parts, dim=self.axis)[self.index]


WHOLE = Shard(axis=0, index=0, num_parts=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A whole tensor in a file; `offset` is its first byte, counted from the file's beginning."""

    path: Path
    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...] | None = None
    """In numbers, where they do not lie one after another."""

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def read(self, shard: Shard = WHOLE) -> Tensor:
        """The part that `shard` names, in memory of its own, in the dtype of the file, on the CPU.

        Raises what `TensorReader` does.
        """
        with TensorReader(self.path) as reader:
            return reader.read(self, shard)


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
        if tensor.stride is not None:
            return self._read_strided(tensor, tensor.stride, shard)
        shape = list(tensor.shape)
        if shard.num_parts > 1:
            shape[shard.axis] //= shard.num_parts
        part = torch.empty(prod(shape) * tensor.dtype.itemsize, dtype=torch.uint8)
        num_runs = prod(shape[: shard.axis])
        run_bytes = len(part) // max(1, num_runs)
        start, view = tensor.offset + shard.index * run_bytes, part.numpy().data
        for run in range(num_runs):
            run_start = start + run * run_bytes * shard.num_parts
            self.fill(view[run * run_bytes : (run + 1) * run_bytes], run_start)
        return part.view(tensor.dtype).view(shape)

    def fill(self, target: memoryview, offset: int) -> None:
        """Read `len(target)` bytes from `offset` on."""
        try:
            while len(target):
                num_bytes = preadv(self._file.fileno(), [target], offset)
                if not num_bytes:
                    raise UserInputError(f"{self.path} became shorter; copy the file again")
                target, offset = target[num_bytes:], offset + num_bytes
        except OSError as error:
            raise UserInputError(f"cannot read {self.path}: {error.strerror}") from error

    def _read_strided(self, tensor: StoredTensor, stride: tuple[int, ...], shard: Shard) -> Tensor:
        """Such a tensor is small: all that lies between its first and its last number is read."""
        steps = zip(tensor.shape, stride, strict=True)
        span = 1 + sum((size - 1) * step for size, step in steps)
        memory = torch.empty(span * tensor.dtype.itemsize, dtype=torch.uint8)
        self.fill(memory.numpy().data, tensor.offset)
        whole = memory.view(tensor.dtype).as_strided(tensor.shape, stride)
        return shard.of(whole).clone(memory_format=torch.contiguous_format)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()
