"""The parts of a model are found where a project's instructions leave them, or it is said."""

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from scope_contracts.errors import UserInputError
from scope_rt.collectives import SoloCollectives
from scope_rt.models.family import Family, WeightsPlace
from scope_rt.models.layout import Layout
from scope_rt.models.loading import ModelFolder
from scope_rt.tensor_files.stored_tensor import Shard, StoredTensor, TensorReader
from tests.real_checkpoints import (
    FASTVIDEO,
    GENERATOR,
    KREA,
    LONGLIVE,
    NEEDS_WAN,
    SELF_FORCING,
    copied,
    keep_generator,
)

pytest.importorskip("yaml")

WAN = "wan_models/Wan2.1-T2V-1.3B"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copied(SELF_FORCING, tmp_path)


def test_a_folder_as_the_project_s_instructions_leave_it_is_a_model(folder: Path) -> None:
    layout = Layout.of(folder, None)
    assert layout.family.name == "self-forcing-1.3b"
    assert layout.config.text_dim == 64, "which its config.json does not state"
    assert layout.vae == folder / WAN / "Wan2.1_VAE.pth"
    files = {path.relative_to(folder).as_posix() for path in layout.files()}
    assert files >= {GENERATOR, f"{WAN}/config.json", "configs/self_forcing_dmd.yaml"}
    assert f"{WAN}/diffusion_pytorch_model.safetensors" not in files


def test_a_diffusers_folder_of_a_causal_class_needs_no_recipe_of_its_own() -> None:
    assert Layout.of(FASTVIDEO, None).family.name == "fastvideo-1.3b"


@pytest.mark.parametrize(
    "prefix", ["", "model._fsdp_wrapped_module.", "generator.model.", "_orig_mod.", "net."]
)
def test_a_trainer_s_prefixes_change_nothing(folder: Path, prefix: str) -> None:
    want = Layout.of(folder, None)
    keep_generator(folder, generator_ema=prefix, critic=prefix)
    got = Layout.of(folder, "self-forcing-1.3b")
    assert got.weights.tensors.keys() == want.weights.tensors.keys()


def test_the_recipe_is_part_of_the_fingerprint_where_the_folder_has_none(folder: Path) -> None:
    def fingerprint(recipe: str) -> str:
        return ModelFolder.open(folder, recipe).fingerprint()

    keep_generator(folder, generator_ema="model.")
    shutil.rmtree(folder / "configs")
    want = ModelFolder.open(folder).fingerprint()
    assert fingerprint("self-forcing-1.3b") == want
    assert fingerprint("causal-forcing-1.3b") != want


def test_the_weights_that_the_recipe_takes_are_part_of_the_fingerprint(folder: Path) -> None:
    def fingerprint(key: str) -> str:
        family = replace(
            Family.named("self-forcing-1.3b"),
            weights=WeightsPlace(state_dicts=(key,)),
            project=None,
        )
        (recipe := folder.parent / f"{key}.toml").write_text(family.to_toml())
        return ModelFolder.open(folder, str(recipe)).fingerprint()

    keep_generator(folder, generator="model.", generator_ema="model.")
    assert fingerprint("generator") != fingerprint("generator_ema")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", "models is no model folder, but holds several: give one of models/fastvideo"),
        ("self-forcing/checkpoints", "checkpoints is a part of the model folder .*/self-forcing: "),
        ("self-forcing/wan_models/Wan2.1-T2V-1.3B", "part of the model folder .*/self-forcing: "),
        ("fastvideo-diffusers/transformer", "part of the model folder .*/fastvideo-diffusers: "),
    ],
)
def test_a_folder_a_level_off_is_refused_with_the_one_that_holds_a_model(
    given: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    for each in (FASTVIDEO, SELF_FORCING):
        (tmp_path / "models" / each.name).symlink_to(each)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserInputError, match=said):
        Layout.of(Path("models") / given, None)


def test_a_folder_levels_above_several_models_gathers_no_files_of_both(tmp_path: Path) -> None:
    models = [tmp_path / "a" / SELF_FORCING.name, tmp_path / "b" / "c" / LONGLIVE.name]
    for path in models:
        (path / "wan_models").mkdir(parents=True)
    with pytest.raises(UserInputError, match=f"several: give one of {models[0]}, {models[1]}$"):
        Layout.of(tmp_path, "longlive-1.3b")


def test_a_model_takes_no_part_of_one_inside_it(folder: Path) -> None:
    shutil.copytree(folder / "wan_models", folder / "A" / "wan_models")
    with pytest.raises(UserInputError, match=f"would take .* model folder {folder}/A: give that o"):
        Layout.of(folder, None)


def test_a_folder_around_one_model_is_refused_for_it_hides_the_configuration(folder: Path) -> None:
    with pytest.raises(UserInputError, match=f"lies in {folder}: give that folder"):
        Layout.of(folder.parent, None)


def test_a_recipe_s_lora_is_not_left_out_of_a_folder_of_parts() -> None:
    with pytest.raises(UserInputError, match=r"longlive-1.3b merges a LoRA.*without \[lora\]"):
        Layout.of(FASTVIDEO, "longlive-1.3b")


def test_a_lora_that_is_there_is_not_left_out() -> None:
    with pytest.raises(
        UserInputError, match=r"lora.pt: generator_lora: .*causvid-1.3b would leave"
    ):
        Layout.of(LONGLIVE, "causvid-1.3b")


def test_a_lora_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    copy = shutil.copytree(LONGLIVE, tmp_path / "longlive")
    lora = copy / "longlive_models/models/lora.pt"
    lora.write_bytes(lora.read_bytes()[:100_000])
    with pytest.raises(UserInputError, match=r"cannot read .*lora.pt: .*copy the file again"):
        Layout.of(copy, "longlive-1.3b")


def test_weights_that_are_replaced_while_they_are_read_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_read, read = 0, TensorReader.read

    def replaced_before_it(
        self: TensorReader, tensor: StoredTensor, shard: Shard, **others: Any
    ) -> torch.Tensor:
        nonlocal num_read
        num_read += 1
        if num_read == 5:
            keep_generator(folder, generator_ema="model.")
        return read(self, tensor, shard, **others)

    model = ModelFolder.open(folder)
    monkeypatch.setattr(TensorReader, "read", replaced_before_it)
    with pytest.raises(UserInputError, match=r"dmd.pt was written while it was read.*start again"):
        model.transformer(SoloCollectives(), dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(UserInputError, match="was written while it was read"):
        model.fingerprint()


def test_another_key_than_the_recipe_asks_for_is_no_substitute(folder: Path) -> None:
    keep_generator(folder, generator="model.")
    with pytest.raises(UserInputError, match=r"self_forcing_dmd.pt: generator.*'generator_ema'"):
        Layout.of(folder, "self-forcing-1.3b")


def test_a_transformer_of_other_sizes_than_every_config_is_refused(folder: Path) -> None:
    path = folder / WAN / "config.json"
    path.write_text(path.read_text().replace('"dim": 96', '"dim": 128'))
    with pytest.raises(UserInputError, match=r"config.json: dim 128.*want 96 and 2"):
        Layout.of(folder, None)


def test_the_base_model_beside_a_checkpoint_is_not_streamed(folder: Path) -> None:
    state = torch.load(folder / GENERATOR, weights_only=True)["generator_ema"]
    base = {name.removeprefix("model."): tensor.clone() for name, tensor in state.items()}
    save_file(base, folder / WAN / "diffusion_pytorch_model.safetensors")
    (path, _), *others = Layout.of(folder, None).weights.by_file()
    assert (path, others) == (folder / GENERATOR, [])


def test_a_file_says_which_of_several_transformers_is_meant(folder: Path) -> None:
    other = folder / "checkpoints" / "other.pt"
    shutil.copy(folder / GENERATOR, other)
    with pytest.raises(UserInputError, match=r"several transformers.*name its file"):
        Layout.of(folder, None)
    model = ModelFolder.open(other)
    assert model.path == folder.resolve()
    assert [path.name for path, _ in model.weights.by_file()] == ["other.pt"]
    assert model.fingerprint()


def test_a_file_without_the_rest_of_its_model_is_refused(folder: Path, tmp_path: Path) -> None:
    alone = shutil.copy(folder / GENERATOR, tmp_path / "alone.pt")
    with pytest.raises(UserInputError, match=r"no folder around it has wan_models/"):
        Layout.of(Path(alone), None)


def test_a_lora_beside_the_parts_is_not_left_out_unsaid(tmp_path: Path) -> None:
    folder = shutil.copytree(FASTVIDEO, tmp_path / "parts")
    assert Layout.of(folder, None).lora is None
    lora = folder / "pytorch_lora_weights.safetensors"
    factors = {"A": torch.ones(2, 64), "B": torch.ones(64, 2)}
    name = "transformer.blocks.0.attn1.to_q.lora_{}.weight"
    save_file({name.format(side): each for side, each in factors.items()}, lora)
    with pytest.raises(UserInputError, match=f"{lora} is a LoRA, which would be left out"):
        Layout.of(folder, None)


@NEEDS_WAN
@pytest.mark.parametrize("folder", [SELF_FORCING, FASTVIDEO, LONGLIVE, KREA], ids=lambda f: f.name)
def test_a_model_is_opened_and_checked_by_headers_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So what is wrong with it is said before gigabytes are read, or digested."""

    def read(*what: object) -> None:
        raise AssertionError("a tensor was read, or a file digested")

    monkeypatch.setattr(TensorReader, "__init__", read)
    monkeypatch.setattr(hashlib, "file_digest", read)
    ModelFolder.open(folder).check_parts()
