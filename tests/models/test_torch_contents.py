"""A .pt is known by the tensors that ranks load of it: nobody reads it for its digest alone, and
slices that are others later are found."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from scope_contracts.errors import FingerprintError
from scope_contracts.weights import added_up, check_loaded
from scope_rt.models.content_cache import Stamp
from scope_rt.models.family import Family
from scope_rt.models.file_contents import FileEntry, entry_of
from scope_rt.models.folder_contents import FolderContents
from scope_rt.models.loading import ModelFolder
from scope_rt.models.manifest import Manifest
from scope_rt.models.shards import is_sharded
from scope_rt.tensor_files.stored_tensor import StoredTensor, TensorReader
from scope_runners.main import main
from tests.models.test_folder_contents import cache, settle
from tests.models.test_manifest import flip
from tests.real_checkpoints import LONGLIVE, SELF_FORCING
from tests.tensor_parallel import CPU, Group

__all__ = ["cache"]
PT = "checkpoints/self_forcing_dmd.pt"
TAKEN, OTHER = "generator_ema", "generator"


@pytest.fixture
def folder(tmp_path: Path, cache: Path) -> Path:
    """With a second generator and an optimizer in its file, as a trainer leaves it."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(SELF_FORCING, folder, ignore=shutil.ignore_patterns("*.rollout.*", "configs"))
    content = torch.load(folder / PT, weights_only=True)
    other = {name: weight + 1 for name, weight in content[TAKEN].items()}
    moments = {"state": {0: {"exp_avg": torch.arange(40.0)}}, "step": 3}
    torch.save(content | {OTHER: other, "optimizer": moments}, folder / PT)
    settle()
    return folder


def opened(folder: Path, key: str = TAKEN) -> ModelFolder:
    text = Family.named("self-forcing-1.3b").to_toml().replace(f'"{TAKEN}"', f'"{key}"')
    recipe = folder.parent / f"{key}.toml"
    recipe.write_text(text)
    return ModelFolder.open(folder, str(recipe))


def loaded(model: ModelFolder, size: int = 2) -> dict[int, Any]:
    """What each rank of a group has read."""
    model.contents.place()
    return {
        rank: model.transformer(Group(rank, size), dtype=torch.bfloat16, device=CPU).as_read.stored
        for rank in range(size)
    }


def learnt(folder: Path, key: str = TAKEN) -> ModelFolder:
    model = opened(folder, key)
    model.learn(added_up(loaded(model), is_sharded), keep=True)
    return model


def test_nobody_reads_a_pt_again_that_ranks_have_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, files = learnt(folder), list[str]()
    read = FolderContents._read_file

    def counted(self: FolderContents, path: Path) -> FileEntry:
        files.append(path.relative_to(folder).as_posix())
        return read(self, path)

    monkeypatch.setattr(FolderContents, "_read_file", counted)
    seen, known = model.fingerprint(), model.known_digests()
    assert PT not in files
    assert (opened(folder).fingerprint(), opened(folder).known_digests()) == (seen, known)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    assert opened(folder).fingerprint() == seen
    assert PT in files


def test_no_byte_of_another_state_dict_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, fill = list[int](), TensorReader.fill

    def counted(self: TensorReader, target: memoryview, offset: int) -> None:
        if self.path == folder / PT:
            read.append(len(target))
        fill(self, target, offset)

    monkeypatch.setattr(TensorReader, "fill", counted)
    model = opened(folder)
    model.fingerprint()
    assert sum(read) == sum(each.num_bytes for each in model.weights.tensors.values())


def test_a_disk_that_gives_other_slices_under_the_same_times_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = learnt(folder)
    known = first.known_digests()
    assert known is not None
    check_loaded(loaded(opened(folder)), known, is_sharded)
    name = "blocks.0.attn1.to_q.weight"
    stamps = {path: Stamp.of(path) for path in folder.rglob("*")}
    flip(folder / PT, first.weights.tensors[name].offset)
    monkeypatch.setattr(Stamp, "of", staticmethod(stamps.__getitem__))
    again = opened(folder)
    known = again.known_digests()
    assert known is not None
    with pytest.raises(FingerprintError, match=name):
        check_loaded(loaded(again), known, is_sharded)


def test_each_recipe_knows_the_state_dict_that_it_takes(folder: Path) -> None:
    mine = learnt(folder).fingerprint()
    assert opened(folder, OTHER).known_digests() is None
    other = learnt(folder, OTHER)
    assert other.fingerprint() != mine
    for key, fingerprint in ((TAKEN, mine), (OTHER, other.fingerprint())):
        assert opened(folder, key).known_digests() is not None
        assert opened(folder, key).fingerprint() == fingerprint


@pytest.mark.parametrize("which", [TAKEN, OTHER, "optimizer"])
def test_a_manifest_knows_every_byte_of_a_pt(
    folder: Path, which: str, capsys: pytest.CaptureFixture[str]
) -> None:
    verify = ["model", "verify", str(folder), "--recipe", "self-forcing-1.3b"]
    assert main([*verify, "--write"]) == 0
    assert main(verify) == 0
    whole = opened(folder)
    fingerprint, weight = whole.fingerprint(), whole.weights.tensors["proj_out.bias"]
    raw = (folder / PT).read_bytes()
    moments = torch.arange(40.0).numpy().tobytes()
    at = {TAKEN: weight.offset, "optimizer": raw.index(moments)}
    value = (torch.load(folder / PT, weights_only=True)[OTHER]["model.head.head.bias"]).numpy()
    at[OTHER] = raw.index(value.tobytes())
    flip(folder / PT, at[which])
    capsys.readouterr()
    assert main(verify) == 1
    named = {TAKEN: f"{TAKEN}/", OTHER: f"{OTHER}/model.head.head.bias", "optimizer": "/data/"}
    assert f"{PT}: tensor " in (said := capsys.readouterr().err)
    assert named[which] in said
    model = opened(folder)
    assert model.fingerprint() == fingerprint, "what ranks load is found by them"
    known = model.known_digests()
    assert known is not None
    if which != TAKEN:
        check_loaded(loaded(model), known, is_sharded)
        return
    with pytest.raises(FingerprintError):
        check_loaded(loaded(model), known, is_sharded)
    with pytest.raises(FingerprintError, match=f"tensor {TAKEN}/"):
        model.check_files(added_up(loaded(model), is_sharded))


def test_what_a_lora_holds_is_compared_with_the_manifest(tmp_path: Path, cache: Path) -> None:
    """Its factors are read by slice, and no rank digests them."""
    folder, file = tmp_path / "checkpoint", "longlive_models/models/lora.pt"
    shutil.copytree(LONGLIVE, folder, ignore=shutil.ignore_patterns("*.rollout.*"))
    Manifest.of(folder).write(folder)
    model = ModelFolder.open(folder, "longlive-1.3b")
    model.fingerprint()
    assert model.lora is not None
    factor = next(iter(model.lora.weights.values())).a
    assert isinstance(factor, StoredTensor)
    flip(folder / file, factor.offset)
    with pytest.raises(FingerprintError, match=f"{file}: tensor generator_lora/{factor.name}"):
        ModelFolder.open(folder, "longlive-1.3b").fingerprint()


def test_a_pt_that_is_compressed_or_has_code_is_known_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "legacy.pt"
    torch.save({"w": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    assert entry_of(path).tensors == {}
    torch.save({"w": torch.ones(3)}, path)
    assert entry_of(path).tensors.keys() == {"w"}
