"""A family is a file of values: the package's own, a person's, and the project's own words."""

from pathlib import Path

import pytest

from scope_contracts.errors import UserInputError
from scope_rt.models.family import Family, family_names

pytest.importorskip("yaml")

SELF_FORCING = Family.named("self-forcing-1.3b")


def project(folder: Path, text: str) -> Path:
    """A folder in which Self-Forcing's own configuration says this."""
    path = folder / "configs" / "self_forcing_dmd.yaml"
    path.parent.mkdir()
    path.write_text(text)
    return folder


@pytest.mark.parametrize("name", family_names())
def test_a_family_written_to_a_file_is_read_as_it_was(name: str, tmp_path: Path) -> None:
    family = Family.named(name)
    path = tmp_path / "mine.toml"
    path.write_text(family.to_toml())
    read = Family.named(str(path))
    assert (read.recipe, read.weights, read.lora) == (family.recipe, family.weights, family.lora)
    assert read.in_folder(tmp_path) == read, "nothing beside its own file counts"


def test_the_steps_of_the_families_are_those_their_projects_feed() -> None:
    assert SELF_FORCING.recipe.timesteps == pytest.approx((1000, 937.5, 833.3333, 625))
    krea = Family.named("krea-14b").recipe.timesteps
    assert krea == pytest.approx((1000, 937.5, 833.3333, 625, 0))
    assert Family.named("causvid-1.3b").recipe.timesteps == (1000, 757, 522)


def test_the_project_s_own_configuration_comes_before_the_recipe(tmp_path: Path) -> None:
    text = """
denoising_step_list: [1000, 500]
denoising_step_list_first_chunk: [1000, 750, 500, 250]
num_frame_per_block: 1
learning_rate: 1e-5
model_kwargs: {timestep_shift: 8.0, local_attn_size: 12, sink_size: 3}
"""
    recipe = SELF_FORCING.in_folder(project(tmp_path, text)).recipe
    assert list(recipe.denoising_steps) == [1000, 500]
    assert list(recipe.first_chunk_steps) == [], "which it does not read"
    assert recipe.frames_per_block == 1
    assert recipe.shift == 8.0
    assert recipe.window_frames == 9, "its window counts the sink in"
    assert recipe.sink_frames == 3


def test_a_folder_without_the_project_s_configuration_has_the_recipe_s_values(
    tmp_path: Path,
) -> None:
    assert SELF_FORCING.in_folder(tmp_path) == SELF_FORCING


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x: !!python/object/apply:os.getpid []", "cannot read .*self_forcing_dmd.yaml"),
        ("denoising_step_list: [250, 500]", "yaml: denoising_step_list: denoising_steps is"),
        (
            "model_kwargs: {local_attn_size: 2}",
            "yaml: local_attn_size, .*: window_frames is 2, want",
        ),
        ("model_kwargs: {local_attn_size: x}", "yaml: local_attn_size: got 'x', want a whole"),
        ("model_kwargs: 3", "yaml: model_kwargs: got 3, want names and values"),
        ("- 1", "yaml: got .*list.*, want names and values"),
        ("{", "cannot read .*yaml"),
    ],
)
def test_a_configuration_that_no_stream_could_follow_is_refused_in_one_sentence(
    tmp_path: Path, text: str, said: str
) -> None:
    with pytest.raises(UserInputError, match=said) as refused:
        SELF_FORCING.in_folder(project(tmp_path, text))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[recipes]", "'recipes' is no table; did you mean 'recipe'"),
        ("recipe = 3", r"write \[recipe\] above its entries"),
        ("[weights]\nstate_dict = 'x'", "has no table recipe"),
        ("[recipe]\nfps = 16", r"\[recipe\]: missing entries: cache_upkeep"),
        ("[recipe]\n[weights]\nkey = 'x'", r"\[weights\] 'key' is no entry"),
        (
            "[recipe]\n[weights]\nstate_dicts = 3",
            r"\[weights\] state_dicts: got 3, want a list of texts",
        ),
        ("[recipe]\n[project]\nfiles = []\ntakes = ['adaptor']", r"did you mean 'adapter'"),
        ("[recipe]\n[lora]\nrank = 8\nalpha = 8", r"\[lora\]: .*state_dict"),
        ("[recipe]\n[lora]\nalpha = inf", r"\[lora\] alpha: got inf, want a number above 0"),
        ("[recipe]\n[lora]\nall_blocks = 1", r"\[lora\] all_blocks: got 1, want true or false"),
    ],
)
def test_a_recipe_file_that_misstates_something_is_refused_in_one_sentence(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UserInputError, match=said) as refused:
        Family.named(str(path))
    assert "\n" not in str(refused.value)


def test_a_name_that_no_recipe_has_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserInputError, match="did you mean 'krea-14b'"):
        Family.named("krea-14")
