"""The weights of a transformer's folder: all of its safetensors files are one model."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Self

from scope_contracts.errors import UserInputError
from scope_rt.models.original_names import to_diffusers
from scope_rt.tensor_files.safetensors_file import tensors_of
from scope_rt.tensor_files.stored_tensor import StoredTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """The weights of a folder's files, by their diffusers name; only headers have been read."""

    tensors: Mapping[str, StoredTensor]

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Read the headers of all `.safetensors` files of `folder`.

        Raises:
            UserInputError: there is no file, one cannot be read or holds other than floating-point
                numbers, or two hold a weight of the same name.
        """
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            raise UserInputError(f"{folder} has no .safetensors file; copy the weights there")
        stored: dict[str, StoredTensor] = {}
        for tensor in (tensor for path in paths for tensor in tensors_of(path)):
            if (other := stored.setdefault(tensor.name, tensor)) is not tensor:
                raise UserInputError(
                    f"weight {tensor.name} is in {other.path} and in {tensor.path}; keep the files "
                    "of one checkpoint only"
                )
        tensors = to_diffusers(stored)
        if len(tensors) < len(stored):
            raise UserInputError(
                f"{folder}: several models share the files, under the same names but for their "
                "prefix; keep one of them"
            )
        return cls(tensors=MappingProxyType(tensors))

    def by_file(self) -> Iterator[tuple[Path, list[tuple[str, StoredTensor]]]]:
        """Each file, with its tensors and their diffusers names in the order of their bytes."""
        named = sorted(self.tensors.items(), key=lambda item: (item[1].path, item[1].offset))
        for path, items in groupby(named, key=lambda item: item[1].path):
            yield path, list(items)
