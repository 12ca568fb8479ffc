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
    """Part number `index` of `num_parts` equal parts along `axis`.

    Parts are of whole `unit`s; where they do not come out even, the last part ends with zeros.
    """

    axis: int
    index: int
    num_parts: int
    unit: int = 1

    def size_of(self, whole: int) -> int:
        """Of each part of an axis of `whole`, zeros included."""
        return -(-whole // (self.unit * self.num_parts)) * self.unit

    def range_in(self, whole: int) -> range:
        """What of an axis of `whole` is in this part."""
        size = self.size_of(whole)
        return range(min(whole, self.index * size), min(whole, (self.index + 1) * size))

    def of(self, tensor: Tensor) -> Tensor:
        """The part of `tensor`: a view of it, unless it ends with zeros."""
        if self.num_parts == 1:
            return tensor
        whole = tensor.shape[self.axis]
        mine = self.range_in(whole)
        part = tensor.narrow(self.axis, mine.start, len(mine))
        if (lacking := self.size_of(whole) - len(mine)) == 0:
            return part
        shape = [*tensor.shape]
        shape[self.axis] = lacking
        return torch.cat([part, tensor.new_zeros(shape)], dim=self.axis)


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

    def num_bytes_of(self, shard: Shard) -> int:
        """Of the part that `shard` names."""
        if shard.num_parts == 1:
            return self.num_bytes
        whole = self.shape[shard.axis]
        return self.num_bytes // max(1, whole) * shard.size_of(whole)

    def read(self, shard: Shard = WHOLE, *, into: Tensor | None = None) -> Tensor:
        """The part that `shard` names, in the dtype of the file, on the CPU.

        Args:
            into: memory (uint8) that it may lie in, if that is enough; else in memory of its own.

        Raises what `TensorReader` does.
        """
        with TensorReader(self.path) as reader:
            return reader.read(self, shard, into=into)


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

    def read(
        self, tensor: StoredTensor, shard: Shard = WHOLE, *, into: Tensor | None = None
    ) -> Tensor:
        """As `StoredTensor.read`."""
        if tensor.stride is not None:
            return self._read_strided(tensor, tensor.stride, shard)
        part = _memory(tensor.num_bytes_of(shard), into)
        if shard.num_parts == 1:
            self.fill(part.numpy().data, tensor.offset)
            return part.view(tensor.dtype).view(tensor.shape)
        shape, axis = list(tensor.shape), shard.axis
        whole, mine = shape[axis], shard.range_in(shape[axis])
        shape[axis] = shard.size_of(whole)
        if len(mine) < shape[axis]:
            part.zero_()
        one = prod(shape[axis + 1 :]) * tensor.dtype.itemsize
        view = part.numpy().data
        for run in range(prod(shape[:axis])):
            target = run * shape[axis] * one
            source = tensor.offset + (run * whole + mine.start) * one
            self.fill(view[target : target + len(mine) * one], source)
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


def _memory(num_bytes: int, given: Tensor | None) -> Tensor:
    """So many bytes of what is given, where that is enough."""
    if given is not None and len(given) >= num_bytes:
        return given[:num_bytes]
    return torch.empty(num_bytes, dtype=torch.uint8)
