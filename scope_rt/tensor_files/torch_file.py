"""A file of torch.save gives tensors and nothing else: code in it is never run.

The tensors are mapped, so that only the bytes of those that are asked for are read. A file of the
old format, and one that was compressed since, are read whole.
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
class MappedTensor:
    """A tensor of a file, under its name there; its bytes are read when they are used."""

    path: Path
    name: str
    mapped: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.mapped.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.mapped.dtype

    def read(self) -> Tensor:
        """The tensor, in memory of its own, in the dtype of the file, on the CPU."""
        return self.mapped.clone(memory_format=torch.contiguous_format)


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

    def tensors(self, key: str = "") -> dict[str, MappedTensor]:
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

    def _tensor(self, name: str, value: object) -> MappedTensor:
        if not (isinstance(value, Tensor) and value.layout is torch.strided):
            kind = type(value).__name__
        elif not value.is_floating_point():
            kind = str(value.dtype)
        else:
            return MappedTensor(path=self.path, name=name, mapped=value)
        raise UserInputError(
            f"{self.path}: {shown(name)} is {kind}, want a tensor of floating-point numbers; copy "
            "the checkpoint's own file"
        )


def _loaded(path: Path) -> object:
    try:
        is_plain = _is_plain(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about what is refused in our own words, or is no harm
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_plain)
    except pickle.UnpicklingError as error:
        raise UserInputError(
            f"{path} is cut off, or holds code or objects beside its tensors, which are never run; "
            "copy the checkpoint's own file"
        ) from error
    except _UNREADABLE as error:
        what = str(error).partition("\n")[0].partition(". ")[0] or type(error).__name__
        raise UserInputError(f"cannot read {path}: {what[:200]}; copy the file again") from error


def _is_plain(path: Path) -> bool:
    """Whether the bytes of its tensors lie in it as they are: of others, a map shows garbage."""
    try:
        with ZipFile(path) as records:
            return all(each.compress_type == ZIP_STORED for each in records.infolist())
    except BadZipFile:
        return False
