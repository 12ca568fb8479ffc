"""The laboratory's launcher and its README know the same experiments."""

import re
from importlib import import_module
from pathlib import Path

import pytest

import scope_lab
from scope_lab.main import EXPERIMENTS, main

README = Path(scope_lab.__file__).parent / "README.md"


def test_the_readme_says_of_every_experiment_what_it_shows_and_how_long_it_takes() -> None:
    rows = [line.split(" | ") for line in README.read_text().splitlines() if line.startswith("| `")]
    named = {re.sub(r"[| `]|FILE", "", row[0]): row for row in rows if len(row) == 4}
    assert EXPERIMENTS.keys() <= named.keys()
    assert all(cell.strip(" |") for name in EXPERIMENTS for cell in named[name])


def test_the_launcher_lists_every_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split()[0] for line in lines] == list(EXPERIMENTS)


@pytest.mark.parametrize("name", [n for n in EXPERIMENTS if n not in ("kv_bench", "train_recall")])
def test_every_experiment_has_a_main(name: str) -> None:
    assert callable(import_module(EXPERIMENTS[name].module).main)


def test_an_unknown_experiment_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["alchemy"]) == 2
    assert "no experiment is called 'alchemy'; scripts/lab lists all" in capsys.readouterr().err
