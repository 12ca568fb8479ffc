"""What lies in a folder, without a byte of a tensor: names, shapes, dtypes, and configurations."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from scope_contracts.errors import UserInputError
from scope_rt.tensor_files.config_file import read_config
from scope_rt.tensor_files.safetensors_file import DTYPES, tensors_of
from scope_rt.tensor_files.state_dict import SAFETENSORS, TORCH
from scope_rt.tensor_files.torch_file import TorchFile

_CONFIGS = ("config.json", "model_index.json")
_DEPTH = 6


class _Stored(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorForm:
    """What a header says of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class StateForm:
    """One state dict of a file: `key` is where it stands in it, "" for a file that is one."""

    file: str
    key: str
    tensors: Mapping[str, TensorForm]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Files by their names relative to `root`."""

    root: Path
    names: tuple[str, ...]
    states: tuple[StateForm, ...]
    configs: Mapping[str, Mapping[str, Any]]
    unreadable: Mapping[tuple[str, str], str]
    """A sentence for each state dict that cannot be read, by file and key, and for each file."""


def listing_of(path: Path) -> Listing:
    """Look at a folder, or at one file.

    Raises:
        UserInputError: there is nothing of that name, or it cannot be looked into.
    """
    try:
        files = [path] if path.is_file() else sorted(_files(path, _DEPTH))
    except OSError as error:
        raise UserInputError(f"cannot look into {path}: {error.strerror}; give a model") from error
    root = path.parent if path.is_file() else path
    states, configs = list[StateForm](), dict[str, dict[str, Any]]()
    unreadable = dict[tuple[str, str], str]()
    for file in files:
        name = file.relative_to(root).as_posix()
        if file.name in _CONFIGS:
            try:
                configs[name] = read_config(file, fix="copy it again")
            except UserInputError as error:
                unreadable[name, ""] = str(error)
        try:
            state_dicts = _state_dicts(file)
        except UserInputError as error:
            unreadable[name, ""] = str(error)
            continue
        for key, tensors in state_dicts.items():
            try:
                states.append(StateForm(file=name, key=key, tensors=_forms(tensors())))
            except UserInputError as error:
                unreadable[name, key] = str(error)
    return Listing(
        root=root,
        names=tuple(file.relative_to(root).as_posix() for file in files),
        states=tuple(states),
        configs=configs,
        unreadable=unreadable,
    )


def _files(folder: Path, depth: int) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_file():
            yield path
        elif path.is_dir() and depth:
            yield from _files(path, depth - 1)


def _state_dicts(path: Path) -> Mapping[str, Callable[[], Iterable[_Stored]]]:
    """What reads the headers of each state dict of a file, by its key."""
    if path.suffix == SAFETENSORS:
        return {"": partial(tensors_of, path, wanted=DTYPES)}
    if path.suffix not in TORCH:
        return {}
    file = TorchFile.open(path)
    return {key: partial(_tensors, file, key) for key in file.keys}


def _tensors(file: TorchFile, key: str) -> Iterable[_Stored]:
    return file.tensors(key).values()


def _forms(tensors: Iterable[_Stored]) -> dict[str, TensorForm]:
    return {each.name: TensorForm(shape=each.shape, dtype=each.dtype) for each in tensors}
