"""A file of torch.save gives tensors, or one sentence; code in it is never run."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch
from torch import Tensor, nn

from scope_contracts.errors import UserInputError
from scope_rt.tensor_files.stored_tensor import Shard, StoredTensor, TensorReader
from scope_rt.tensor_files.torch_file import HeldTensor, TorchFile

WEIGHTS = {"a.weight": torch.arange(6.0).view(2, 3).t(), "b": torch.ones(2, dtype=torch.bfloat16)}


def tensors_in(path: Path) -> dict[str, StoredTensor | HeldTensor]:
    """Of a file that is one state dict."""
    return TorchFile.open(path).tensors()


class LeavesATrace:
    """Whoever unpickles it makes a folder."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("is_zip", [True, False])
def test_tensors_are_those_that_were_saved_in_memory_of_their_own(
    tmp_path: Path, is_zip: bool
) -> None:
    path = tmp_path / "file.pth"
    torch.save(WEIGHTS, path, _use_new_zipfile_serialization=is_zip)
    tensors = tensors_in(path)
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        "a.weight": (3, 2),
        "b": (2,),
    }
    for name, want in WEIGHTS.items():
        read = tensors[name].read()
        assert torch.equal(read, want)
        assert read.is_contiguous()
        assert read.dtype is want.dtype
        read.zero_()
        assert torch.equal(tensors[name].read(), want)


def test_a_file_that_was_compressed_since_has_the_same_tensors(tmp_path: Path) -> None:
    """A map of it would show bytes of compressed data, without a word."""
    saved, path = tmp_path / "saved.pth", tmp_path / "file.pth"
    weights = {"a": torch.arange(4000.0), "b": torch.randn(20_000)}
    torch.save(weights, saved)
    with ZipFile(saved) as records, ZipFile(path, "w", ZIP_DEFLATED) as compressed:
        for each in records.infolist():
            compressed.writestr(each.filename, records.read(each))
    tensors = tensors_in(path)
    assert all(torch.equal(tensors[name].read(), weight) for name, weight in weights.items())


@pytest.mark.parametrize("save", ["zip", "legacy", "plain pickle"])
@pytest.mark.parametrize("is_inside", [True, False])
def test_code_is_never_run(tmp_path: Path, save: str, is_inside: bool) -> None:
    path, trace = tmp_path / "file.pth", tmp_path / "trace"
    code = LeavesATrace(trace)
    content = {**WEIGHTS, "c": code} if is_inside else code
    if save == "plain pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=save == "zip")
    with pytest.raises(UserInputError, match=r"file\.pth .*never run; copy the checkpoint's own"):
        tensors_in(path)
    assert not trace.exists()
    pickle.loads(pickle.dumps(code))
    assert trace.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (WEIGHTS | {"c": "text"}, "file.pth: 'c' is str, want a tensor of floating-point numbers"),
        (WEIGHTS | {"c": torch.ones(1, dtype=torch.int32)}, "'c' is torch.int32, want a tensor"),
        ({"generator": WEIGHTS}, "file.pth: 'generator' is dict, want a tensor"),
        ({}, "file.pth has no tensors; copy the checkpoint's own file"),
        ([torch.ones(1)], "file.pth holds 'list', want tensors by their names; copy"),
        (nn.Linear(2, 2), "file.pth .* code or objects beside its tensors, which are never run"),
    ],
)
def test_what_holds_something_else_is_refused(
    tmp_path: Path, content: object, message: str
) -> None:
    torch.save(content, tmp_path / "file.pth")
    with pytest.raises(UserInputError, match=message):
        tensors_in(tmp_path / "file.pth")


def test_a_tensor_that_is_not_dense_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.eye(2).to_sparse()}, tmp_path / "file.pth")
    with pytest.raises(UserInputError, match=r"file\.pth: 'a' is Tensor, want a tensor of"):
        tensors_in(tmp_path / "file.pth")


def test_state_dicts_under_keys_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"generator": WEIGHTS, "critic": {"state": {0: 1}}, "ema": {}, "step": 3}, path)
    file = TorchFile.open(path)
    assert file.keys == ("generator", "critic", "ema")
    assert file.tensors("generator").keys() == WEIGHTS.keys()
    for key, message in (
        ("critic", "file.pt: 'state' is dict, want a tensor"),
        ("ema", "has no tensors under 'ema' .state dicts: 'generator', 'critic', 'ema'.; copy"),
        ("step", "has no tensors under 'step' "),
        ("generator_ema", "has no tensors under 'generator_ema' "),
        ("", "file.pt: 'generator' is dict, want a tensor"),
    ):
        with pytest.raises(UserInputError, match=message):
            file.tensors(key)


def half(whole: bytes) -> bytes:
    return whole[: len(whole) // 2]


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize(
    "damage",
    [
        half,
        lambda whole: b"",
        lambda whole: whole[:-1],
        lambda whole: b"<html>",
        lambda whole: whole[9:],
    ],
    ids=["half", "empty", "last byte", "a page", "beginning"],
)
def test_a_file_that_is_cut_off_is_named(
    tmp_path: Path, damage: Callable[[bytes], bytes], is_zip: bool
) -> None:
    path = tmp_path / "file.pth"
    torch.save({"a": torch.ones(400)}, path, _use_new_zipfile_serialization=is_zip)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserInputError, match=r"^[^\n]*file\.pth[^\n]*; copy [^\n]*$"):
        tensors_in(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match=r"cannot read .*file\.pth: .*No such file"):
        tensors_in(tmp_path / "file.pth")


def test_only_what_is_used_is_read(tmp_path: Path) -> None:
    """The tensor is a view of the mapped file: what is written there later is seen."""
    path = tmp_path / "file.pth"
    torch.save({"a": torch.full((1000,), 2.0)}, path)
    tensors = tensors_in(path)
    whole = path.read_bytes()
    start = whole.index(torch.full((1000,), 2.0).numpy().tobytes())
    with path.open("r+b") as file:
        file.seek(start)
        file.write(torch.full((1000,), 3.0).numpy().tobytes())
    later: Tensor = tensors["a"].read()
    assert later.unique().tolist() == [3.0]


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_slice_is_that_part_of_the_whole(tmp_path: Path, is_zip: bool, axis: int) -> None:
    path, whole = tmp_path / "file.pt", torch.randn(4, 6)
    weights = {"plain": whole, "transposed": whole.t().contiguous().t(), "inside": whole[1:3]}
    torch.save({"generator": weights}, path, _use_new_zipfile_serialization=is_zip)
    for name, tensor in TorchFile.open(path).tensors("generator").items():
        parts = [tensor.read(Shard(axis=axis, index=index, num_parts=2)) for index in range(2)]
        assert torch.equal(torch.cat(parts, axis), weights[name]), name
        assert all(part.is_contiguous() for part in parts), name


def test_a_slice_costs_its_own_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = tmp_path / "file.pt", list[int]()
    torch.save({"a": torch.ones(8, 6), "b": torch.ones(1000)}, path)
    fill = TensorReader.fill

    def counted(self: TensorReader, target: memoryview, offset: int) -> None:
        read.append(len(target))
        fill(self, target, offset)

    monkeypatch.setattr(TensorReader, "fill", counted)
    for axis in range(2):
        read.clear()
        tensors_in(path)["a"].read(Shard(axis=axis, index=1, num_parts=2))
        assert sum(read) == 8 * 6 * 4 // 2


def test_a_tensor_beyond_the_end_of_its_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"a": torch.ones(1000)}, path)
    file = TorchFile.open(path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(UserInputError, match=r"file\.pt: 'a' is cut off; copy the file again"):
        file.tensors()


@pytest.mark.parametrize("num_parts", [1, 2, 3])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_slice_may_lie_in_memory_that_is_given(tmp_path: Path, num_parts: int, axis: int) -> None:
    """Also one that ends with zeros, over what lay there before."""
    path, whole = tmp_path / "file.pt", torch.randn(4, 4)
    torch.save({"a": whole}, path)
    tensor = tensors_in(path)["a"]
    assert isinstance(tensor, StoredTensor)
    memory = torch.full((64,), 7, dtype=torch.uint8)
    for index in range(num_parts):
        shard = Shard(axis=axis, index=index, num_parts=num_parts)
        part = tensor.read(shard, into=memory)
        assert torch.equal(part, shard.of(whole))
        assert part.nbytes == tensor.num_bytes_of(shard)
        assert part.untyped_storage().data_ptr() == memory.data_ptr()
        assert torch.equal(tensor.read(shard, into=memory[:8]), part), "too little was given"
