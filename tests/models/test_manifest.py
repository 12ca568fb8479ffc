"""A flipped byte, swapped shards or permuted rows of a model are refused before the first chunk."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from scope_contracts.errors import FingerprintError, UserInputError
from scope_contracts.weights import added_up, check_loaded
from scope_rt.models import content_cache
from scope_rt.models.content_cache import Stamp
from scope_rt.models.file_contents import MANIFEST_NAME
from scope_rt.models.fingerprint import shard_digest
from scope_rt.models.loading import WEIGHTS_NAME, ModelFolder, embedded_folder
from scope_rt.models.manifest import Manifest
from scope_rt.models.shards import is_sharded
from scope_rt.tensor_files.safetensors_file import tensors_of
from scope_rt.tensor_files.stored_tensor import Shard, TensorReader
from scope_runners.main import main
from tests.damage import flip
from tests.models.test_folder_contents import cache, folder, settle
from tests.models.test_weight_files import rename_to_original, split_file
from tests.real_checkpoints import SELF_FORCING
from tests.tensor_parallel import CPU, Group

__all__ = ["cache", "flip", "folder"]
WEIGHTS = f"transformer/{WEIGHTS_NAME}"
SHARDED = "blocks.0.attn1.to_q.weight"


def vouched(folder: Path) -> ModelFolder:
    Manifest.of(folder).write(folder)
    return ModelFolder.open(folder)


def load(model: ModelFolder, size: int = 1, dtype: torch.dtype = torch.float32) -> None:
    """What ranks do before the first chunk."""
    known = model.known_digests()
    read = {
        rank: model.transformer(Group(rank, size), dtype=dtype, device=CPU).as_read.stored
        for rank in range(size)
    }
    if known is not None:
        try:
            check_loaded(read, known, is_sharded)
        except FingerprintError:
            model.check_files(added_up(read, is_sharded))
            raise
    model.fingerprint()
    model.codec(), model.text_encoder()


def test_the_embedded_models_manifest_fits() -> None:
    """If not: scope-rt model verify tiny --write."""
    assert Manifest.read(embedded_folder()) == Manifest.of(embedded_folder())


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_vouched", [True, False])
def test_whole_folders_are_loaded_at_every_degree(
    folder: Path, size: int, dtype: torch.dtype, is_vouched: bool
) -> None:
    load(vouched(folder) if is_vouched else ModelFolder.open(folder), size, dtype)


@pytest.mark.parametrize("arrange", [lambda folder: split_file(folder, 3), rename_to_original])
def test_several_files_and_original_names_can_be_vouched_for(
    folder: Path, arrange: Callable[[Path], None]
) -> None:
    arrange(folder)
    load(vouched(folder), 2)


def test_the_manifest_is_no_part_of_the_model(folder: Path) -> None:
    before = ModelFolder.open(folder).fingerprint()
    assert vouched(folder).fingerprint() == before


@pytest.mark.parametrize("part", [WEIGHTS, f"vae/{WEIGHTS_NAME}", "text_encoder/model.safetensors"])
def test_a_flipped_byte_anywhere_in_the_weights_is_named(folder: Path, part: str) -> None:
    vouched(folder)
    whole = (folder / part).read_bytes()
    for position in [*range(0, len(whole), len(whole) // 9), len(whole) - 1]:
        flip(folder / part, position)
        with pytest.raises((FingerprintError, UserInputError)) as told:
            load(ModelFolder.open(folder), 2)
        assert part.split("/")[0] in str(told.value)
        assert "\n" not in str(told.value)
        (folder / part).write_bytes(whole)
    load(ModelFolder.open(folder), 2)


@pytest.mark.parametrize("name", ["recipe.json", "transformer/config.json", "vae/config.json"])
def test_a_changed_setting_is_named_until_somebody_vouches_for_it(folder: Path, name: str) -> None:
    vouched(folder)
    path = folder / name
    path.write_text(path.read_text() + " ")
    with pytest.raises(FingerprintError, match=f"{name} is not what it was; copy the folder"):
        load(ModelFolder.open(folder))
    load(vouched(folder))


def test_a_tensor_is_named_and_a_file_that_was_added(folder: Path) -> None:
    vouched(folder)
    (stored,) = (each for each in tensors_of(folder / WEIGHTS) if each.name == SHARDED)
    flip(folder / WEIGHTS, stored.offset + 5)
    with pytest.raises(FingerprintError, match=f"{WEIGHTS}: tensor {SHARDED} is not what it was"):
        load(ModelFolder.open(folder), 2)
    flip(folder / WEIGHTS, stored.offset + 5)
    (folder / "notes.txt").write_text("mine")
    ModelFolder.open(folder).fingerprint()
    save_file({"a": torch.ones(1)}, folder / "vae" / "other.safetensors")
    with pytest.raises(FingerprintError, match=r"vae/other\.safetensors was added"):
        ModelFolder.open(folder).fingerprint()


def permute_rows(weights: dict[str, Tensor]) -> None:
    weights[SHARDED] = weights[SHARDED].flip(0).contiguous()


def swap_halves(weights: dict[str, Tensor]) -> None:
    weights[SHARDED] = weights[SHARDED].roll(len(weights[SHARDED]) // 2, 0).contiguous()


def swap_tensors(weights: dict[str, Tensor]) -> None:
    other = SHARDED.replace("to_q", "to_v")
    weights[SHARDED], weights[other] = weights[other].clone(), weights[SHARDED].clone()


def change_one(weights: dict[str, Tensor]) -> None:
    weights[SHARDED][3, 2] += 1


@pytest.mark.parametrize("damage", [permute_rows, swap_halves, swap_tensors, change_one])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("is_vouched", [True, False])
def test_a_disk_that_gives_other_bytes_under_the_same_times_is_named(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[dict[str, Tensor]], None],
    size: int,
    is_vouched: bool,
) -> None:
    """Nothing looks at the whole folder again then; the slices tell."""
    load(vouched(folder) if is_vouched else ModelFolder.open(folder), size)
    stamps = {path: Stamp.of(path) for path in folder.rglob("*")}
    weights = load_file(folder / WEIGHTS)
    damage(weights)
    save_file(weights, folder / WEIGHTS)
    monkeypatch.setattr(Stamp, "of", staticmethod(stamps.__getitem__))
    with pytest.raises(FingerprintError, match=f"{WEIGHTS}(/|: tensor ){SHARDED}"):
        load(ModelFolder.open(folder), size)


@pytest.mark.parametrize("is_vouched", [True, False])
def test_two_ranks_shards_that_were_swapped_are_named(folder: Path, is_vouched: bool) -> None:
    model = vouched(folder) if is_vouched else ModelFolder.open(folder)
    model.fingerprint()
    whole = model.known_digests()
    assert whole is not None
    held = {}
    for rank in range(2):
        other = model.transformer(Group(1 - rank, 2), dtype=torch.float32, device=CPU)
        held[rank] = dict(other.as_read.stored)
        with TensorReader(folder / WEIGHTS) as reader:
            for name, tensor in model.weights.tensors.items():
                if is_sharded(name):  # what this rank would say of the other one's bytes
                    axis = 1 if name.endswith(("to_out.0.weight", "net.2.weight")) else 0
                    part = reader.read(tensor, Shard(axis=axis, index=1 - rank, num_parts=2))
                    here = Shard(axis=axis, index=rank, num_parts=2)
                    held[rank][f"{WEIGHTS}/{name}"] = shard_digest(part, here)
    with pytest.raises(FingerprintError, match=f"weight {WEIGHTS}/.*do not add up"):
        check_loaded(held, whole, is_sharded)


@pytest.mark.parametrize("part", ["vae", "text_encoder"])
def test_a_codec_or_text_encoder_that_rots_after_first_use_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    load(ModelFolder.open(folder))
    stamps = {path: Stamp.of(path) for path in folder.rglob("*")}
    (weights,) = (folder / part).glob("*.safetensors")
    flip(weights, -3)
    monkeypatch.setattr(Stamp, "of", staticmethod(stamps.__getitem__))
    with pytest.raises(
        FingerprintError, match=rf"{part}/{weights.name}: tensor .* is not what it was"
    ):
        load(ModelFolder.open(folder))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "{",
        lambda text: json.dumps(json.loads(text) | {"version": 0}),
        lambda text: text.replace("0", "1", 1),
        lambda text: json.dumps(json.loads(text) | {"files": {}}),
    ],
)
def test_a_damaged_manifest_is_named(folder: Path, spoil: Callable[[str], str]) -> None:
    vouched(folder)
    path = folder / MANIFEST_NAME
    path.write_text(spoil(path.read_text()))
    with pytest.raises(UserInputError, match=f"cannot use {path}.*--write"):
        ModelFolder.open(folder)


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["model", "verify", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_the_command_says_what_is_whole_and_names_what_is_not(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(capsys, folder)[0] == 2, "nothing is known of it"
    assert said(capsys, folder, "--write")[0] == 0
    code, out, err = said(capsys, folder, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["differences"] == []
    assert json.loads(out)["compared_with"] == MANIFEST_NAME
    (stored,) = (each for each in tensors_of(folder / WEIGHTS) if each.name == SHARDED)
    flip(folder / WEIGHTS, stored.offset)
    code, out, err = said(capsys, folder)
    assert code == 1
    assert out.startswith(f"compared with {MANIFEST_NAME}\n")
    assert "NOT whole" in out
    assert f"{WEIGHTS}: tensor {SHARDED} is not what it was" in err
    assert err.count("\n") == 1
    (folder / "recipe.json").unlink()
    differences = json.loads(said(capsys, folder, "--json")[1])["differences"]
    assert {each["file"] for each in differences} == {WEIGHTS, "recipe.json"}
    assert said(capsys, folder.with_name("none"))[0] == 2
    assert said(capsys, "tiny")[0] == 0


def test_weights_of_which_a_manifest_says_nothing_accuse_no_file(folder: Path) -> None:
    vouched(folder)
    whole = (folder / WEIGHTS).rename(folder / WEIGHTS.replace("model", "model-2"))
    model = ModelFolder.open(folder)
    assert model.known_digests() is None
    names = (f"transformer/{whole.name}/{name}" for name in model.weights.tensors)
    model.check_files(dict.fromkeys(names, 0))
    with pytest.raises(FingerprintError, match=f"{whole.name} was added"):
        model.fingerprint()


def test_nobody_vouches_for_what_is_no_model_folder_yet(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "recipe.json").unlink()
    code, _, err = said(capsys, folder, "--write")
    assert code == 2
    assert "has no recipe.json" in err
    assert not (folder / MANIFEST_NAME).exists()


def test_a_checkpoint_is_vouched_for_and_verified_by_the_recipe_that_it_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(SELF_FORCING, folder, ignore=shutil.ignore_patterns("*.rollout.*", "configs"))
    for flags in (["--write"], []):
        code, _, err = said(capsys, folder, "--recipe", "causvid-1.3b", *flags)
        assert code == 2
        assert "recipe causvid-1.3b takes 'generator' of a .pt" in err
        assert said(capsys, folder, "--recipe", "self-forcing-1.3b", *flags)[0] == 0


def test_the_command_compares_with_what_was_read_at_first_use(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content_cache, "_SETTLED_NS", 0)
    settle()
    ModelFolder.open(folder).fingerprint()
    code, out, _ = said(capsys, folder)
    assert code == 0
    assert out.startswith("compared with what this machine read at first use\n")
    stamps = {path: Stamp.of(path) for path in folder.rglob("*")}
    flip(folder / WEIGHTS, -1)
    monkeypatch.setattr(Stamp, "of", staticmethod(stamps.__getitem__))
    code, _, err = said(capsys, folder)
    assert code == 1
    assert f"{WEIGHTS}: tensor" in err


def test_a_stream_of_a_damaged_model_shows_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vouched(folder)
    flip(folder / WEIGHTS, -1)
    out = tmp_path / "a.mp4"
    stream = ["stream", "--prompt", "a red circle", "--seconds", "1", "--model", str(folder)]
    assert main([*stream, "--out", str(out)]) == 2
    assert f"{WEIGHTS}: tensor" in capsys.readouterr().err
    assert not out.exists()


def test_no_start_follows_one_that_found_the_model_damaged(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    vouched(folder)
    flip(folder / WEIGHTS, -1)
    stream = ["stream", "--prompt", "a red circle", "--seconds", "1", "--model", str(folder)]
    group = ["--plan", "tp_v1_1", "--tp", "2", "--oversubscribe"]
    assert main([*stream, *group, "--out", str(tmp_path / "a.mp4")]) == 2
    said = capfd.readouterr().err
    assert f"{WEIGHTS}: tensor" in said
    assert "starting again" not in said
