"""A part of a diffusers folder: its weights are the files that its index names, or one file.

What else lies there is another variant of the same weights, and is never mixed in.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from scope_contracts.errors import UserInputError, mismatch, shown
from scope_rt.tensor_files.safetensors_file import tensors_of
from scope_rt.tensor_files.stored_tensor import StoredTensor

_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"
_COPY = "copy the folder again"


def tensors_of_folder(folder: Path, stem: str) -> dict[str, StoredTensor]:
    """The tensors of `folder`, by their names in the files; only headers are read.

    Args:
        stem: the name of the files without shard number and suffix, as the library that wrote the
            folder calls them: "model" for transformers, "diffusion_pytorch_model" for diffusers.

    Raises:
        UserInputError: a file is missing or cannot be read, or it and the index disagree.
    """
    index = folder / f"{stem}{_INDEX_SUFFIX}"
    if not index.exists():
        return {tensor.name: tensor for tensor in tensors_of(_only_file(folder, stem))}
    weight_map = _weight_map(index)
    stored: dict[str, StoredTensor] = {}
    for file in sorted(set(weight_map.values())):
        if not (folder / file).is_file():
            name = next(name for name in weight_map if weight_map[name] == file)
            raise UserInputError(f"{index}: {name} is in {file}, which is not there; {_COPY}")
        for tensor in tensors_of(folder / file):
            if weight_map.get(tensor.name) == file:
                stored[tensor.name] = tensor
            elif tensor.name not in weight_map:
                raise UserInputError(
                    f"{index} does not list {tensor.name}, which is in {tensor.path}; {_COPY}"
                )
    for name, file in weight_map.items():
        if name not in stored:
            raise UserInputError(f"{index}: {name} is not in {file}, as it says; {_COPY}")
    return stored


def _only_file(folder: Path, stem: str) -> Path:
    """The one file of a folder without an index."""
    named = folder / f"{stem}{_SUFFIX}"
    if named.exists():
        return named
    paths = sorted(folder.glob(f"*{_SUFFIX}"))
    if not paths:
        raise UserInputError(f"{folder} has no {named.name}; copy the weights there")
    if len(paths) > 1:
        raise UserInputError(
            f"{folder} has {paths[0].name} and others, and neither {named.name} nor its index; "
            "keep the files of one variant, with their index"
        )
    return paths[0]


def _weight_map(index: Path) -> Mapping[str, str]:
    try:
        raw = json.loads(index.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserInputError(f"cannot read {index}: {error}; {_COPY}") from error
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        want = "the file of each tensor"
        raise UserInputError(mismatch(f"{index}: weight_map", got=weight_map, want=want, fix=_COPY))
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(_SUFFIX):
            raise UserInputError(
                f"{index}: {shown(name)} is in {shown(file)}, want a {_SUFFIX} file beside it; "
                f"{_COPY}"
            )
    return weight_map
