"""The laboratory's launcher and its README know the same experiments."""

import re
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


SLOW_TO_IMPORT = ("kv_bench", "train_recall")
PYTEST = "tests"
"""Takes what pytest takes."""


@pytest.mark.parametrize("name", sorted(EXPERIMENTS.keys() - {*SLOW_TO_IMPORT, PYTEST}))
def test_a_bad_argument_of_any_experiment_is_one_sentence(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--no-such-option"]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith(f"{name}: there is no option '--no-such-option'")
    assert sentence.endswith(f"see scripts/lab {name} --help")


def test_an_unknown_experiment_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["alchemy"]) == 2
    assert "no experiment is called 'alchemy'; scripts/lab lists all" in capsys.readouterr().err
