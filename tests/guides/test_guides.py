"""What a guide tells a reader to save and to run does what the guide says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scope_rt.models.recipe import Recipe

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "runbooks" / "guides"
TIMEOUT_S = 100


def blocks(guide: Path, language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", guide.read_text(), re.M | re.S)


def save_files(guide: Path, folder: Path) -> None:
    """Every Python block is a file, named in its first line."""
    for block in blocks(guide, "python"):
        first = block.splitlines()[0]
        assert re.fullmatch(r"# \w+\.py", first), f"{guide.name}: a block begins with {first!r}"
        (folder / first.removeprefix("# ")).write_text(block)


def run(command: str, folder: Path) -> str:
    """Run one line as the reader would, with the programs of this environment; what it printed."""
    places = [str(ROOT), str(ROOT / "contracts"), str(ROOT / "runners")]
    environ = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(places),
        "CUDA_VISIBLE_DEVICES": "",
    }
    said = subprocess.run(
        command.split(),
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert said.returncode == 0, f"{command}:\n{said.stderr}"
    return said.stdout


@pytest.mark.timeout(4 * TIMEOUT_S)
def test_a_model_with_parts_of_ones_own_streams_as_its_guide_says(tmp_path: Path) -> None:
    guide = GUIDES / "your-own-model.md"
    save_files(guide, tmp_path)
    commands = [line for block in blocks(guide, "sh") for line in block.splitlines()]
    made, *streamed = [run(command, tmp_path) for command in commands]
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
