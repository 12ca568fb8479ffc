"""What a guide tells a reader to save and to run does what the guide says."""

import json
import re
from pathlib import Path

import pytest

from scope_rt.models.recipe import Recipe
from tests.guides.blocks import GUIDES, TIMEOUT_S, commands, run, save_files


@pytest.mark.timeout(4 * TIMEOUT_S)
def test_a_model_with_parts_of_ones_own_streams_as_its_guide_says(tmp_path: Path) -> None:
    guide = GUIDES / "your-own-model.md"
    save_files(guide, tmp_path)
    made, *streamed = [run(command, tmp_path) for command in commands(guide)]
    assert not made
    assert len(streamed) == 2
    for printed in streamed:
        assert printed.splitlines() == [f"{index} (12, 64, 64, 3) uint8" for index in range(3)]
    assert set(json.loads((tmp_path / "my-model" / "recipe.json").read_text())) == set(
        Recipe.__slots__
    )


def test_the_guide_explains_every_entry_of_a_recipe() -> None:
    text = (GUIDES / "your-own-model.md").read_text()
    table = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    explained = {name for cell in table for name in re.findall(r"`(\w+)`", cell)}
    assert explained == set(Recipe.__slots__)
