"""What the changelog says moved is where it says."""

import re
from pathlib import Path

from scope_contracts.log_records import LOG_VERSION
from scope_lab.main import EXPERIMENTS
from scope_rt import StreamConfig, __version__

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CHANGELOG.md").read_text()


def test_it_names_this_version_and_this_log() -> None:
    assert f"## [Unreleased]: {__version__}\n" in TEXT
    assert f"are version {LOG_VERSION}." in TEXT


def test_every_experiment_that_it_names_is_one() -> None:
    named = set(re.findall(r"scripts/lab ([a-z_-]+)", TEXT))
    assert named
    assert named <= EXPERIMENTS.keys()


def test_every_link_to_a_script_is_there() -> None:
    for name in ("bench_stream", "bench_contract", "parity", "soak"):
        assert f"`{name}`" in TEXT or f"`scripts/{name}`" in TEXT
        assert (ROOT / "scripts" / name).is_symlink()


def test_the_python_line_that_it_shows_is_one() -> None:
    (shown,) = re.findall(r"StreamSession\((StreamConfig\.of\(.*?\))\)", TEXT)
    config = eval(shown, {"StreamConfig": StreamConfig})
    assert config.mesh.tp == 2
