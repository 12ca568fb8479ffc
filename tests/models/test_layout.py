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
from tests.real_checkpoints import FASTVIDEO, KREA, LONGLIVE, NEEDS_WAN, SELF_FORCING
from tests.tiny_folder import tiny_folder

pytest.importorskip("yaml")

CHECKPOINT = "checkpoints/self_forcing_dmd.pt"
WAN = "wan_models/Wan2.1-T2V-1.3B"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of Self-Forcing's folder without its recordings."""
    ignored = shutil.ignore_patterns("*.rollout.*", "tokenizer_cases.json")
    return shutil.copytree(SELF_FORCING, tmp_path / "self-forcing", ignore=ignored)


def checkpoint(folder: Path, **states: str) -> None:
    """Write the generator under these keys, with these prefixes."""
    path = folder / CHECKPOINT
    weights = torch.load(path, weights_only=True)["generator_ema"]
    torch.save(
        {
            key: {name.replace("model.", prefix, 1): each for name, each in weights.items()}
            for key, prefix in states.items()
        },
        path,
    )


def test_a_folder_as_the_project_s_instructions_leave_it_is_a_model(folder: Path) -> None:
    layout = Layout.of(folder, None)
    assert layout.family.name == "self-forcing-1.3b"
    assert layout.config.text_dim == 64, "which its config.json does not state"
    assert layout.vae == folder / WAN / "Wan2.1_VAE.pth"
    files = {path.relative_to(folder).as_posix() for path in layout.files()}
    assert files >= {CHECKPOINT, f"{WAN}/config.json", "configs/self_forcing_dmd.yaml"}
    assert f"{WAN}/diffusion_pytorch_model.safetensors" not in files


def test_a_diffusers_folder_of_a_causal_class_needs_no_recipe_of_its_own() -> None:
    assert Layout.of(FASTVIDEO, None).family.name == "fastvideo-1.3b"


@pytest.mark.parametrize(
    "prefix", ["", "model._fsdp_wrapped_module.", "generator.model.", "_orig_mod.", "net."]
)
def test_a_trainer_s_prefixes_change_nothing(folder: Path, prefix: str) -> None:
    want = Layout.of(folder, None)
    checkpoint(folder, generator_ema=prefix, critic=prefix)
    got = Layout.of(folder, "self-forcing-1.3b")
    assert got.weights.tensors.keys() == want.weights.tensors.keys()


def test_the_recipe_is_part_of_the_fingerprint_where_the_folder_has_none(folder: Path) -> None:
    def fingerprint(recipe: str) -> str:
        return ModelFolder.open(folder, recipe).fingerprint()

    checkpoint(folder, generator_ema="model.")
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

    checkpoint(folder, generator="model.", generator_ema="model.")
    assert fingerprint("generator") != fingerprint("generator_ema")


OF_SELF_FORCING = r"configs/self_forcing_dmd.yaml is of recipe self-forcing-1.3b"


@pytest.mark.parametrize(
    ("source", "recipe", "said"),
    [
        (SELF_FORCING, "causal-forcing-1.3b", OF_SELF_FORCING),
        (SELF_FORCING, "causal-forcing-2step-1.3b", OF_SELF_FORCING),
        (FASTVIDEO, "krea-14b", "transformer/config.json is of recipe fastvideo-1.3b"),
        (tiny_folder(), "krea-14b", "recipe.json is the recipe of these weights"),
    ],
)
def test_a_folder_that_says_another_recipe_is_refused_but_for_a_file_of_one_s_own(
    source: Path, recipe: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserInputError, match=f"{said}.*with {recipe} the video may be wrong"):
        Layout.of(source, recipe)
    (mine := tmp_path / "mine.toml").write_text(Family.named(recipe).to_toml())
    layout = Layout.of(source, str(mine))
    assert (layout.family.recipe, layout.looks_like) == (Family.named(recipe).recipe, ())


def test_files_and_a_configuration_that_tell_two_recipes_are_refused(folder: Path) -> None:
    checkpoint(folder, generator_ema="model._fsdp_wrapped_module.")
    with pytest.raises(UserInputError, match=f"{OF_SELF_FORCING}; with causal-forcing-1.3b"):
        Layout.of(folder, None)


@pytest.mark.parametrize(
    ("prefix", "recipe", "looks_like"),
    [
        ("model.", "self-forcing-1.3b", ()),
        ("model.", "causal-forcing-2step-1.3b", ("self-forcing-1.3b",)),
        ("model._fsdp_wrapped_module.", "self-forcing-1.3b", ("causal-forcing-1.3b",)),
        ("model._fsdp_wrapped_module.", "causal-forcing-2step-1.3b", ()),
    ],
)
def test_where_only_the_form_of_its_files_speaks_against_a_recipe_it_is_told(
    folder: Path, prefix: str, recipe: str, looks_like: tuple[str, ...]
) -> None:
    shutil.rmtree(folder / "configs")
    checkpoint(folder, generator_ema=prefix)
    assert Layout.of(folder, recipe).looks_like == looks_like


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
            checkpoint(folder, generator_ema="model.")
        return read(self, tensor, shard, **others)

    model = ModelFolder.open(folder)
    monkeypatch.setattr(TensorReader, "read", replaced_before_it)
    with pytest.raises(UserInputError, match=r"dmd.pt was written while it was read.*start again"):
        model.transformer(SoloCollectives(), dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(UserInputError, match="was written while it was read"):
        model.fingerprint()


def test_another_key_than_the_recipe_asks_for_is_no_substitute(folder: Path) -> None:
    checkpoint(folder, generator="model.")
    with pytest.raises(UserInputError, match=r"self_forcing_dmd.pt: generator.*'generator_ema'"):
        Layout.of(folder, "self-forcing-1.3b")


def test_a_file_that_tells_no_family_is_asked_about(folder: Path) -> None:
    checkpoint(folder, generator="model.")
    with pytest.raises(UserInputError, match=r"--recipe.*causal-forcing-1.3b.*causvid-1.3b"):
        Layout.of(folder, None)


def test_a_transformer_of_other_sizes_than_every_config_is_refused(folder: Path) -> None:
    path = folder / WAN / "config.json"
    path.write_text(path.read_text().replace('"dim": 96', '"dim": 128'))
    with pytest.raises(UserInputError, match=r"config.json: dim 128.*want 96 and 2"):
        Layout.of(folder, None)


def test_the_base_model_beside_a_checkpoint_is_not_streamed(folder: Path) -> None:
    state = torch.load(folder / CHECKPOINT, weights_only=True)["generator_ema"]
    base = {name.removeprefix("model."): tensor.clone() for name, tensor in state.items()}
    save_file(base, folder / WAN / "diffusion_pytorch_model.safetensors")
    (path, _), *others = Layout.of(folder, None).weights.by_file()
    assert (path, others) == (folder / CHECKPOINT, [])


def test_a_file_says_which_of_several_transformers_is_meant(folder: Path) -> None:
    other = folder / "checkpoints" / "other.pt"
    shutil.copy(folder / CHECKPOINT, other)
    with pytest.raises(UserInputError, match=r"several transformers.*name its file"):
        Layout.of(folder, None)
    model = ModelFolder.open(other)
    assert model.path == folder.resolve()
    assert [path.name for path, _ in model.weights.by_file()] == ["other.pt"]
    assert model.fingerprint()


def test_a_file_without_the_rest_of_its_model_is_refused(folder: Path, tmp_path: Path) -> None:
    alone = shutil.copy(folder / CHECKPOINT, tmp_path / "alone.pt")
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


def test_a_family_is_advised_only_where_its_weights_are(folder: Path) -> None:
    """CausVid's configuration beside weights that it does not take: no advice leads back."""
    shutil.rmtree(folder / "configs")
    (folder / "configs").mkdir()
    (folder / "configs" / "wan_causal_dmd.yaml").write_text("{}\n")
    with pytest.raises(UserInputError, match=r"copy the weights that causvid-1.3b's") as refused:
        Layout.of(folder, None)
    assert "take --recipe" not in str(refused.value)
    with pytest.raises(UserInputError, match=r"takes 'generator' of a .pt; copy the") as refused:
        Layout.of(folder, "causvid-1.3b")
    assert "another family" not in str(refused.value)
    (folder / "configs" / "wan_causal_dmd.yaml").unlink()
    with pytest.raises(UserInputError, match=r"another family with --recipe \(self-forcing-1.3b"):
        Layout.of(folder, "causvid-1.3b")
