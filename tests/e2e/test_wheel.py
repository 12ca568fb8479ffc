"""What a user installs is the built wheel: the product alone, and all of it works anywhere."""

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import warm_python

ROOT = Path(__file__).parents[2]
OURS = {"scope_contracts", "scope_rt", "scope_runners"}
LABORATORY = re.compile(r"(^|[/_])(lab|bench|fuzz|parity_record|soak|train|recall)")
CITED = re.compile(r'runbooks/([\w/-]+)\.md|runbook: ClassVar\[str \| None\] = "([\w/-]+)"')


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*build, str(ROOT)], check=True, capture_output=True, timeout=100)
    (built,) = folder.glob("*.whl")
    return built


@dataclass(frozen=True, slots=True)
class Installed:
    """The wheel in a folder of its own, used from another one, by processes that `server` forks."""

    site: Path
    folder: Path
    server: warm_python.Server

    def python(self, *arguments: str) -> str:
        done = warm_python.run(
            [sys.executable, "-P", *arguments],
            env=os.environ | {"PYTHONPATH": str(self.site)},
            cwd=self.folder,
            timeout=100,
            server=self.server,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def scope_rt(self, *arguments: str) -> str:
        return self.python("-m", "scope_runners.main", *arguments)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    site = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(wheel)], check=True, timeout=100)
    away = tmp_path_factory.mktemp("away")
    with warm_python.Server(away / "warm", site) as server:
        yield Installed(site, away, server)


def _sizes(wheel: Path) -> dict[str, int]:
    with zipfile.ZipFile(wheel) as archive:
        return {item.filename: item.file_size for item in archive.infolist()}


def test_wheel_adds_no_name_but_ours_and_carries_the_model(wheel: Path) -> None:
    sizes = _sizes(wheel)
    tops = {name.split("/")[0] for name in sizes}
    assert {top for top in tops if not top.endswith(".dist-info")} == OURS
    assert {f"{name}/py.typed" for name in OURS} <= sizes.keys()
    weights = {name: size for name, size in sizes.items() if name.endswith(".safetensors")}
    assert len(weights) == 3
    assert sum(weights.values()) < 10e6


def test_wheel_has_no_laboratory_no_training_and_no_fuzzer(wheel: Path) -> None:
    assert [name for name in _sizes(wheel) if LABORATORY.search(name)] == []
    in_repository = [str(path.relative_to(ROOT)) for path in (ROOT / "runners").rglob("*.py")]
    assert len([name for name in in_repository if LABORATORY.search(name)]) > 50


def test_installed_wheel_streams_and_replays_away_from_the_repository(installed: Installed) -> None:
    stream = ["stream", "--prompt", "a red circle", "--seconds", "1", "--out", "a.mp4"]
    shown = installed.scope_rt(*stream, "--record", "a.scope", "--json")
    assert json.loads(shown)["totals"]["frames"] == 24
    assert "result     equal" in installed.scope_rt("replay", "a.scope")
    imported = installed.python("-c", "import scope_rt; print(scope_rt.__file__)")
    assert imported.startswith(str(installed.site))


def test_installed_wheel_breaks_a_stream_and_names_what_it_broke(installed: Installed) -> None:
    done = installed.scope_rt("break-it", "plan-mismatch/arguments", "--json")
    (result,) = json.loads(done)
    assert result["verdict"] == "passed"
    assert set(result["ends"]) == {"ParityError"}


def test_every_runbook_that_a_message_cites_is_in_the_wheel_and_can_be_read(
    wheel: Path, installed: Installed
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".py")]
        texts = [archive.read(name).decode() for name in names]
    cited = {a or b for text in texts for a, b in CITED.findall(text)}
    assert {"drift", "hang", "rank-loss", "settings"} <= cited
    listed = installed.scope_rt("runbook").splitlines()
    assert cited <= {line.split()[0] for line in listed}
    page = (ROOT / "runbooks" / "hang.md").read_text()
    assert installed.scope_rt("runbook", "runbooks/hang.md") == page
