"""The index of a folder says which files are its weights; one that disagrees with them is named."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from scope_contracts.errors import UserInputError
from scope_rt.tensor_files.folder import tensors_of_folder

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file({"a": torch.zeros(2), "b": torch.ones(3)}, tmp_path / FIRST)
    save_file({"c": torch.full((4,), 2.0)}, tmp_path / SECOND)
    write_map(tmp_path, {"a": FIRST, "b": FIRST, "c": SECOND})
    return tmp_path


def write_map(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_the_files_of_the_index_are_the_weights_and_no_others(folder: Path) -> None:
    save_file({"a": torch.full((2,), 9.0)}, folder / "model.fp16.safetensors")
    save_file({"a": torch.full((2,), 9.0)}, folder / "model.safetensors")
    tensors = tensors_of_folder(folder, "model")
    assert {name: tensor.read().tolist() for name, tensor in tensors.items()} == {
        "a": [0.0] * 2,
        "b": [1.0] * 3,
        "c": [2.0] * 4,
    }


@pytest.mark.parametrize("name", ["model.safetensors", "another.safetensors"])
def test_without_an_index_one_file_is_the_weights(tmp_path: Path, name: str) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / name)
    assert tensors_of_folder(tmp_path, "model")["a"].path == tmp_path / name


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda folder: (folder / INDEX).write_text('{"weight_'),
            f"cannot read .*{INDEX}: .*; copy",
        ),
        (lambda folder: (folder / INDEX).write_text('{"metadata": {}}'), "weight_map: got None"),
        (lambda folder: write_map(folder, {}), "weight_map: got {}"),
        (
            lambda folder: write_map(folder, {"a": "../../../etc/model.safetensors"}),
            f"{INDEX}: 'a' is in '../../../etc/model.safetensors', want a .safetensors file beside",
        ),
        (lambda folder: write_map(folder, {"a": "model.pth"}), "'a' is in 'model.pth', want a"),
        (lambda folder: write_map(folder, {"a": 1}), "'a' is in 1, want a"),
        (
            lambda folder: write_map(folder, {"a": FIRST, "b": "model-00003-of-00003.safetensors"}),
            f"{INDEX}: b is in model-00003-of-00003.safetensors, which is not there; copy",
        ),
        (
            lambda folder: write_map(folder, {"a": FIRST, "b": SECOND, "c": SECOND}),
            f"{INDEX}: b is not in {SECOND}, as it says; copy",
        ),
        (
            lambda folder: write_map(folder, {"a": FIRST, "c": SECOND}),
            f"{INDEX} does not list b, which is in .*{FIRST}; copy",
        ),
        (lambda folder: (folder / SECOND).write_bytes(b""), f"cannot read .*{SECOND}: .*; copy"),
        (
            lambda folder: (folder / INDEX).unlink(),
            f"has {FIRST} and others, and neither model.saf",
        ),
    ],
)
def test_an_index_that_is_not_that_of_its_files_is_refused(
    folder: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(folder)
    with pytest.raises(UserInputError, match=message) as raised:
        tensors_of_folder(folder, "model")
    assert re.fullmatch(r"[^\n]+", str(raised.value))


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match=r"has no model\.safetensors; copy the weights there"):
        tensors_of_folder(tmp_path, "model")
