"""A file of torch.save gives tensors and nothing else: code in it is never run.

Where each tensor's bytes lie is read first; they are read when a tensor, or a slice of it, is asked
for. A file of the old format, and one that was compressed since, are read whole.
"""

import pickle
import struct
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch
from torch import Tensor

from scope_contracts.errors import UserInputError, shown
from scope_rt.tensor_files.stored_tensor import WHOLE, Shard, StoredTensor

_UNREADABLE = (
    pickle.UnpicklingError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
)
"""What unpickling raises for bytes that are no file of tensors."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldTensor:
    """A tensor of a file that had to be read whole, under its name there."""

    path: Path
    name: str
    held: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.held.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.held.dtype

    def read(self, shard: Shard = WHOLE) -> Tensor:
        """As `StoredTensor.read`; nothing is read any more."""
        return shard.of(self.held).clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TorchFile:
    """What lies in a file: one state dict, or several under a key each."""

    path: Path
    content: Mapping[object, object]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read what the file says of its tensors, and none of their bytes.

        Raises:
            UserInputError: it cannot be read, has code in it, or holds no dictionary.
        """
        content = _loaded(path)
        if not isinstance(content, Mapping):
            raise UserInputError(
                f"{path} holds {shown(type(content).__name__)}, want tensors by their names; copy "
                "the checkpoint's own file"
            )
        return cls(path=path, content=content)

    @property
    def keys(self) -> tuple[str, ...]:
        """Under which there are state dicts; a single "" where the file is one itself."""
        keys = [str(key) for key, value in self.content.items() if isinstance(value, Mapping)]
        return tuple(keys) or ("",)

    def tensors(self, key: str = "") -> dict[str, StoredTensor | HeldTensor]:
        """The tensors of one state dict, by their names.

        Raises:
            UserInputError: it is not there or is empty, or a value in it is not a tensor.
        """
        state: object = self.content.get(key) if key else self.content
        if not isinstance(state, Mapping) or not state:
            there = ", ".join(map(repr, self.keys))
            what = f"tensors under {key!r} (state dicts: {there})" if key else "tensors"
            raise UserInputError(f"{self.path} has no {what}; copy the checkpoint's own file")
        return {str(name): self._tensor(str(name), value) for name, value in state.items()}

    def _tensor(self, name: str, value: object) -> StoredTensor | HeldTensor:
        if not (isinstance(value, Tensor) and value.layout is torch.strided):
            kind = type(value).__name__
        elif not value.is_floating_point():
            kind = str(value.dtype)
        elif value.is_meta:
            return self.stored(name, value)
        else:
            return HeldTensor(path=self.path, name=name, held=value)
        raise UserInputError(
            f"{self.path}: {shown(name)} is {kind}, want a tensor of floating-point numbers; copy "
            "the checkpoint's own file"
        )

    def stored(self, name: str, value: Tensor) -> StoredTensor:
        """Where one of its tensors lies that were not read. Raises `UserInputError`."""
        storage = value.untyped_storage()
        at = storage._checkpoint_offset  # where torch found its bytes in the file
        assert at is not None, "torch says it of every storage that it does not read"
        if at + storage.nbytes() > self.path.stat().st_size:
            raise UserInputError(f"{self.path}: {shown(name)} is cut off; copy the file again")
        return StoredTensor(
            path=self.path,
            name=name,
            offset=at + int(value.storage_offset()) * value.dtype.itemsize,
            shape=tuple(value.shape),
            dtype=value.dtype,
            stride=None if value.is_contiguous() else value.stride(),
        )


def _loaded(path: Path) -> object:
    """Its tensors are on the meta device, and know where their bytes lie, but for those of a file
    in which they do not lie as they are."""
    try:
        device = "meta" if is_plain(path) else "cpu"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about what is refused in our own words, or is no harm
            return torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserInputError(
            f"{path} is cut off, or holds code or objects beside its tensors, which are never run; "
            "copy the checkpoint's own file"
        ) from error
    except _UNREADABLE as error:
        what = str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__
        raise UserInputError(f"cannot read {path}: {what[:200]}; copy the file again") from error


def is_plain(path: Path) -> bool:
    """Whether the bytes of its tensors lie in it as they are."""
    try:
        with ZipFile(path) as records:
            return all(each.compress_type == ZIP_STORED for each in records.infolist())
    except BadZipFile:
        return False
