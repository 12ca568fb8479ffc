"""A rank reads the bytes of its slices, each once, and holds little beside them."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from scope_contracts.errors import FingerprintError, UserInputError
from scope_contracts.weights import check_loaded
from scope_rt.bit_digest import bit_digest
from scope_rt.models.fingerprint import Fingerprint
from scope_rt.models.loading import WEIGHTS_NAME, ModelFolder, build_transformer
from scope_rt.models.original_names import RENAMES
from scope_rt.models.shards import is_sharded
from scope_rt.models.weight_files import WeightFiles
from scope_rt.tensor_files.stored_tensor import TensorReader
from tests.sparse_checkpoint import write_sparse_transformer
from tests.tensor_parallel import CPU, Group
from tests.tiny_folder import CONFIG, write_tiny_folder

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_folder(tmp_path / "model")


def split_file(folder: Path, num_files: int) -> None:
    """Spread the transformer's weights over several files."""
    path = folder / "transformer" / WEIGHTS_NAME
    weights = load_file(path)
    path.unlink()
    for index in range(num_files):
        part = {name: weights[name] for name in list(weights)[index::num_files]}
        save_file(part, folder / "transformer" / f"part-{index}.safetensors")


def rename_to_original(folder: Path) -> None:
    """Give the transformer's weights the names of Wan's own repository."""
    path = folder / "transformer" / WEIGHTS_NAME
    renamed = {}
    for name, weight in load_file(path).items():
        for original, diffusers in reversed(RENAMES):
            if diffusers != "scale_shift_table":  # the head's is told by its whole name
                name = name.replace(diffusers, original)
        renamed["head.modulation" if name == "scale_shift_table" else name] = weight
    save_file({f"model.{name}": weight for name, weight in renamed.items()}, path)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_slices_are_those_of_the_whole_checkpoint(
    folder: Path, size: int, dtype: torch.dtype
) -> None:
    whole = load_file(folder / "transformer" / WEIGHTS_NAME)
    model = ModelFolder.open(folder)
    sums = {}
    for rank in range(size):
        group = Group(rank, size)
        loaded = model.transformer(group, dtype=dtype, device=CPU)
        want = build_transformer(CONFIG, whole, group, dtype=dtype, device=CPU)
        sums[rank] = Fingerprint(loaded, group).checksums
        assert loaded.as_read.used == sums[rank]
        for (name, got), weight in zip(loaded.named_parameters(), want.parameters(), strict=True):
            assert got.dtype is dtype, name
            assert torch.equal(got, weight), name
            assert got.is_contiguous(), name
    checkpoint = {name: bit_digest(weight.to(dtype)) for name, weight in whole.items()}
    check_loaded(sums, checkpoint, is_sharded)
    if size > 1:
        other = model.transformer(Group(1, size), dtype=dtype, device=CPU)
        moved = Fingerprint(other, Group(0, size))  # rank 0 has loaded rank 1's slices
        with pytest.raises(FingerprintError, match="do not add up to the checkpoint"):
            check_loaded(sums | {0: moved.checksums}, checkpoint, is_sharded)


@pytest.mark.parametrize("arrange", [lambda folder: split_file(folder, 3), rename_to_original])
def test_several_files_and_original_names_are_the_same_weights(
    folder: Path, arrange: object
) -> None:
    group = Group(1, 2)
    before = ModelFolder.open(folder)
    want = before.transformer(group, dtype=torch.float32, device=CPU).state_dict()
    assert callable(arrange)
    arrange(folder)
    after = ModelFolder.open(folder)
    got = after.transformer(group, dtype=torch.float32, device=CPU).state_dict()
    for name, weight in want.items():
        assert torch.equal(got[name], weight), name


def test_each_rank_reads_its_slices_only_and_each_byte_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split_file(folder, 2)
    model, size, reads = ModelFolder.open(folder), 4, list[tuple[Path, int, int]]()
    fill, read_by = TensorReader.fill, dict[int, list[tuple[Path, int, int]]]()

    def counted(self: TensorReader, target: memoryview, offset: int) -> None:
        reads.append((self.path, offset, offset + len(target)))
        fill(self, target, offset)

    monkeypatch.setattr(TensorReader, "fill", counted)
    for rank in range(size):
        reads.clear()
        model.transformer(Group(rank, size), dtype=torch.float32, device=CPU)
        read_by[rank] = sorted(reads)
    sharded = {n: t.num_bytes for n, t in model.weights.tensors.items() if is_sharded(n)}
    others = {n: t.num_bytes for n, t in model.weights.tensors.items() if not is_sharded(n)}
    for spans in read_by.values():
        assert sum(end - start for _, start, end in spans) == (
            sum(sharded.values()) // size + sum(others.values())
        )
        for (path, _, end), (next_path, start, _) in pairwise(spans):
            assert path != next_path or end <= start, "no byte is read twice"
    together = {byte for spans in read_by.values() for path, a, b in spans for byte in (path, a, b)}
    assert len(together) > size, "ranks read different places"


def test_a_rank_holds_at_most_1_3_times_its_shard(tmp_path: Path) -> None:
    if not Path("/proc/self/status").is_file():
        pytest.skip("the peak of a process is read from Linux's /proc")
    write_sparse_transformer(write_tiny_folder(tmp_path / "model") / "big")
    dtypes = ("float16", "float32")
    said = subprocess.run(
        [sys.executable, "-m", "tests.models.peak_of_loading", str(tmp_path), *dtypes],
        # Blocks as large as a real model's weights leave the process when they are freed.
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        cwd=ROOT,
    )
    assert said.returncode == 0, said.stderr
    for dtype, line in zip(dtypes, said.stdout.splitlines(), strict=True):
        seen = json.loads(line)
        assert seen["shard_bytes"] > 100e6
        assert seen["peak_bytes"] <= 1.3 * seen["shard_bytes"], (dtype, seen)


def save(folder: Path, name: str, **weights: Tensor) -> None:
    save_file(weights, folder / f"{name}.safetensors")


def test_one_weight_in_two_files_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "a", x=torch.zeros(2))
    save(tmp_path, "b", x=torch.zeros(2))
    with pytest.raises(UserInputError, match=r"weight x is in .*a\.safetensors and in .*b\."):
        WeightFiles.open(tmp_path)


def test_two_models_in_one_folder_are_refused(tmp_path: Path) -> None:
    names = ("model.blocks.0.self_attn.q.bias", "generator.blocks.0.self_attn.q.bias")
    save(tmp_path, "a", **{name: torch.zeros(2) for name in names})
    with pytest.raises(UserInputError, match="several models share the files"):
        WeightFiles.open(tmp_path)


def test_weights_that_are_whole_numbers_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "a", x=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(UserInputError, match="weight x is I32, want one of F64, F32, F16, BF16"):
        WeightFiles.open(tmp_path)


def test_a_file_that_became_shorter_since_it_was_opened_is_refused(folder: Path) -> None:
    model, path = ModelFolder.open(folder), folder / "transformer" / WEIGHTS_NAME
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserInputError, match="became shorter"):
        model.transformer(Group(0, 1), dtype=torch.float32, device=CPU)


def test_a_file_that_vanished_since_it_was_opened_is_refused(folder: Path) -> None:
    model = ModelFolder.open(folder)
    (folder / "transformer" / WEIGHTS_NAME).unlink()
    with pytest.raises(UserInputError, match="cannot read"):
        model.transformer(Group(0, 1), dtype=torch.float32, device=CPU)
    with pytest.raises(UserInputError, match="cannot read"):
        model.fingerprint()
