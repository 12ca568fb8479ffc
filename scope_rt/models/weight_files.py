"""The weights of a transformer: a folder's safetensors files, or a state dict of another file."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Self

from scope_contracts.errors import UserInputError
from scope_rt.models.original_names import to_diffusers
from scope_rt.tensor_files.folder import tensors_of_folder
from scope_rt.tensor_files.safetensors_file import tensors_of
from scope_rt.tensor_files.state_dict import state_dict_of
from scope_rt.tensor_files.stored_tensor import StoredTensor
from scope_rt.tensor_files.torch_file import TorchFile

_STEM = "diffusion_pytorch_model"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """The weights of a folder's files, by their diffusers name; only headers have been read."""

    tensors: Mapping[str, StoredTensor]

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Read the headers of the files of `folder`: those that its index names, or all.

        Raises:
            UserInputError: there is no file, one cannot be read or holds other than floating-point
                numbers, or two hold a weight of the same name.
        """
        if (folder / f"{_STEM}.safetensors.index.json").exists():
            return cls._of(tensors_of_folder(folder, _STEM), where=folder)
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
        return cls._of(stored, where=folder)

    @classmethod
    def of_state_dict(cls, paths: Sequence[Path], key: str) -> Self:
        """Those under `key` of a .pt, or of safetensors files that are one state dict (`key` "").

        Raises:
            UserInputError: a file cannot be read, or is of a format that has to be read whole.
        """
        stored: dict[str, StoredTensor] = {}
        for path in paths:
            tensors = TorchFile.open(path).tensors(key) if key else state_dict_of(path)
            for name, tensor in tensors.items():
                if not isinstance(tensor, StoredTensor):
                    raise UserInputError(
                        f"{path} is compressed, or of torch's first format; load it with "
                        "torch.load(weights_only=True), and save it again"
                    )
                stored[name] = tensor
        return cls._of(stored, where=paths[0])

    @classmethod
    def _of(cls, stored: Mapping[str, StoredTensor], *, where: Path) -> Self:
        tensors = to_diffusers(stored)
        if len(tensors) < len(stored):
            raise UserInputError(
                f"{where}: several models share the files, under the same names but for their "
                "prefix; keep one of them"
            )
        return cls(tensors=MappingProxyType(tensors))

    def by_file(self) -> Iterator[tuple[Path, list[tuple[str, StoredTensor]]]]:
        """Each file, with its tensors and their diffusers names in the order of their bytes."""
        named = sorted(self.tensors.items(), key=lambda item: (item[1].path, item[1].offset))
        for path, items in groupby(named, key=lambda item: item[1].path):
            yield path, list(items)
