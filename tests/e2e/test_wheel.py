"""What a user installs is the built wheel: our three names, the model inside, and it streams."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = {"scope_contracts", "scope_rt", "scope_runners"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*build, str(ROOT)], check=True, capture_output=True, timeout=100)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_adds_no_name_but_ours_and_carries_the_model(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        sizes = {item.filename: item.file_size for item in archive.infolist()}
    tops = {name.split("/")[0] for name in sizes}
    assert {top for top in tops if not top.endswith(".dist-info")} == OURS
    assert {f"{name}/py.typed" for name in OURS} <= sizes.keys()
    weights = {name: size for name, size in sizes.items() if name.endswith(".safetensors")}
    assert len(weights) == 4
    assert sum(weights.values()) < 16e6


def test_installed_wheel_streams_away_from_the_repository(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(wheel)], check=True, timeout=100)
    command = [sys.executable, "-P", "-m", "scope_runners.main", "stream", "--json"]
    arguments = ["--prompt", "a red circle", "--seconds", "1", "--out", str(tmp_path / "a.mp4")]
    shown = subprocess.run(
        [*command, *arguments],
        env=os.environ | {"PYTHONPATH": str(site)},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        timeout=100,
    )
    summary = json.loads(shown.stdout)
    assert summary["totals"]["frames"] == 24
    where = "import scope_rt; print(scope_rt.__file__)"
    imported = subprocess.run(
        [sys.executable, "-P", "-c", where],
        env=os.environ | {"PYTHONPATH": str(site)},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert imported.stdout.startswith(str(site))
