"""A recipe that no stream could follow is refused in one sentence that names the entry."""

import json
from pathlib import Path

import pytest

from scope_contracts.errors import UserInputError
from scope_rt.models.recipe import RECIPE_NAME, Recipe
from tests.tiny_folder import KREA_RECIPE, RECIPE

WRONG: dict[str, tuple[object, ...]] = {
    "denoising_steps": (None, 5, [], ["1000"], [True], [500, 750], [500, 500], [1001], [500, -1]),
    "shift": (None, "5", True, 0, -1.0, float("nan"), float("inf"), 10**400),
    "frames_per_block": (None, "3", 3.0, True, 0, 7),
    "window_frames": (None, "6", 6.0, 0, 2),
    "sink_frames": (None, "1", 1.5, False, -1),
    "fps": (None, "16", 16.0, 0),
    "default_height": (None, "16", 16.5, 0, -16),
    "default_width": (None, "32", [], 0),
    "cache_upkeep": (None, "magic", 1, []),
    "kv_cache_num_frames": (None, "0", 0.0, -1, 4),
    "warp_steps": (None, "true", 1, 0),
    "latent_limit": ("30", True, 0, -1.0),
    "first_chunk_steps": (None, 5, ["1000"], [500, 750], [1001]),
    "start_frame": (None, "true", 1, True),
    "kv_cache_attention_bias": (None, "1", True, 0, 1.5),
    "rollout_frames": (None, "21", -1, 4, 21),
    "rollout_overlap": (None, "3", 1.5, -1, 3),
    "positions": (None, "window", 1),
    "new_text": (None, "reset", []),
    "recompute_text": (None, "next", "previous"),
    "transition_weights": (None, "linear", 0),
}
"""Of a recipe with clean passes, a block of 3 and a window of 6."""


def refusal(folder: Path, recipe: Recipe, **entries: object) -> str:
    recipe.save(folder)
    path = folder / RECIPE_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    with pytest.raises(UserInputError) as refused:
        Recipe.from_folder(folder)
    return str(refused.value)


@pytest.mark.parametrize("name", WRONG)
def test_an_entry_of_a_wrong_type_or_range_is_named_with_what_is_wanted(
    tmp_path: Path, name: str
) -> None:
    for value in WRONG[name]:
        said = refusal(tmp_path, RECIPE, **{name: value})
        assert said.startswith(f"{tmp_path / RECIPE_NAME}: ")
        assert f"{name} is " in said or f"{name}, which is " in said
        assert ", want " in said
        assert "\n" not in said


def test_every_entry_has_wrong_values_here() -> None:
    assert set(WRONG) == set(Recipe.__slots__)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"kv_cache_num_frames": 0}, "kv_cache_num_frames is 0, want 1 to 4"),
        ({"kv_cache_num_frames": 5}, "kv_cache_num_frames is 5, want 1 to 4"),
        ({"sink_frames": 1}, "sink_frames is 1, want 0 with cache_upkeep recompute"),
    ],
)
def test_a_recompute_recipe_needs_context_in_the_window_and_no_sink(
    tmp_path: Path, entries: dict[str, object], said: str
) -> None:
    assert said in refusal(tmp_path, KREA_RECIPE, **entries)


@pytest.mark.parametrize("text", ["[]", "3", "{", "[" * 100_000, "\xff"])
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / RECIPE_NAME).write_text(text, encoding="latin-1")
    with pytest.raises(UserInputError, match=RECIPE_NAME):
        Recipe.from_folder(tmp_path)


@pytest.mark.parametrize("recipe", [RECIPE, KREA_RECIPE])
def test_a_saved_recipe_is_read_as_it_was(tmp_path: Path, recipe: Recipe) -> None:
    recipe.save(tmp_path)
    assert Recipe.from_folder(tmp_path) == recipe
