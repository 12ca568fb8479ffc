"""The family is what a folder's own files tell; files that contradict each other tell none."""

import shutil
from pathlib import Path

import pytest

from scope_contracts.errors import UserInputError
from scope_rt.models.family import Family
from scope_rt.models.layout import Layout
from scope_rt.models.loading import ModelFolder
from tests.real_checkpoints import FASTVIDEO, LONGLIVE, SELF_FORCING, copied, keep_generator
from tests.tiny_folder import tiny_folder

pytest.importorskip("yaml")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copied(SELF_FORCING, tmp_path)


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
    keep_generator(folder, generator_ema="model._fsdp_wrapped_module.")
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
    keep_generator(folder, generator_ema=prefix)
    assert Layout.of(folder, recipe).looks_like == looks_like


def test_a_file_that_tells_no_family_is_asked_about(folder: Path) -> None:
    keep_generator(folder, generator="model.")
    with pytest.raises(UserInputError, match=r"--recipe.*causal-forcing-1.3b.*causvid-1.3b"):
        Layout.of(folder, None)


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


INTERACTIVE, INFINITY = "longlive_interactive_inference.yaml", "longlive_inference_infinity.yaml"
LORA = "longlive_models/models/lora.pt"


@pytest.fixture
def longlive(tmp_path: Path) -> Path:
    """Without a configuration of its project."""
    folder = copied(LONGLIVE, tmp_path)
    shutil.rmtree(folder / "configs")
    return folder


def configured(folder: Path, *names: str) -> Path:
    """With these files in `configs/`; what is not LongLive's says nothing."""
    (folder / "configs").mkdir()
    for name in names:
        source, target = LONGLIVE / "configs" / name, folder / "configs" / name
        target.write_text(source.read_text() if source.exists() else "{}\n")
    return folder


@pytest.mark.parametrize(
    ("configs", "family"),
    [
        ([INTERACTIVE], "longlive-1.3b"),
        ([INFINITY], "longlive-infinity-1.3b"),
        ([INTERACTIVE, INFINITY], "longlive-1.3b"),
    ],
)
@pytest.mark.parametrize("has_lora", [True, False])
def test_the_project_s_own_configuration_tells_the_family(
    longlive: Path, configs: list[str], family: str, has_lora: bool
) -> None:
    configured(longlive, *configs)
    if has_lora:
        assert Layout.of(longlive, None).family.name == family
        return
    (longlive / LORA).unlink()
    with pytest.raises(UserInputError, match=f"recipe {family} merges a LoRA.*lora.pt.*'gen"):
        Layout.of(longlive, None)


def test_a_lora_that_is_not_there_is_named_where_nothing_tells_the_family(longlive: Path) -> None:
    (longlive / LORA).unlink()
    with pytest.raises(UserInputError, match=r"longlive-1.3b \(takes the LoRA 'generator_lora', w"):
        Layout.of(longlive, None)


@pytest.mark.parametrize(
    ("key", "prefix", "config", "family"),
    [
        ("generator_ema", "", "self_forcing_dmd", "self-forcing-1.3b"),
        ("generator", "model.", "causal_forcing_dmd_chunkwise", "causal-forcing-chunk-1.3b"),
        ("generator", "model.", "causal_forcing_dmd_framewise", "causal-forcing-1.3b"),
        ("generator", "model.", "wan_causal_dmd", "causvid-1.3b"),
        (
            "generator_ema",
            "model._fsdp_wrapped_module.",
            "causal_forcing_dmd_chunkwise",
            "causal-forcing-chunk-1.3b",
        ),
    ],
)
def test_one_configuration_decides_where_the_form_of_the_files_does_not(
    folder: Path, key: str, prefix: str, config: str, family: str
) -> None:
    shutil.rmtree(folder / "configs")
    configured(folder, f"{config}.yaml")
    keep_generator(folder, **{key: prefix})
    assert Layout.of(folder, None).family.name == family


@pytest.mark.parametrize(
    ("configs", "said"),
    [
        (
            ["causal_forcing_dmd_framewise.yaml", "wan_causal_dmd.yaml"],
            r"framewise.yaml is of recipe causal-forcing-1.3b, and .*causvid-1.3b; name the one",
        ),
        (
            ["causal_forcing_dmd_framewise.yaml", "causal_forcing_dmd_chunkwise.yaml"],
            r"several families.*--recipe.*: causal-forcing-1.3b; causal-forcing-chunk-1.3b",
        ),
    ],
)
@pytest.mark.parametrize("prefix", ["model.", ""])
def test_configurations_that_contradict_each_other_decide_nothing(
    folder: Path, configs: list[str], said: str, prefix: str
) -> None:
    shutil.rmtree(folder / "configs")
    configured(folder, *configs)
    keep_generator(folder, generator=prefix)
    with pytest.raises(UserInputError, match=said):
        Layout.of(folder, None)
    assert Layout.of(folder, "causal-forcing-1.3b").family.name == "causal-forcing-1.3b"


def test_the_rank_of_a_lora_is_that_of_its_file_or_the_advice_names_the_recipe(
    longlive: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(text := Family.named("longlive-1.3b").to_toml())
    with pytest.raises(UserInputError, match=r"got 8, want 256, by recipe .*mine.toml.*write this"):
        ModelFolder.open(longlive, str(mine))
    mine.write_text(text.replace("rank = 256\n", "").replace("alpha = 256.0", "alpha = 16"))
    lora = ModelFolder.open(longlive, str(mine)).lora
    assert lora is not None
    assert {low_rank.scale for low_rank in lora.weights.values()} == {2.0}
