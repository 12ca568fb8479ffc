"""The tables of the runbooks say what the code does."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from scope_rt.config import VARIABLES, RuntimeConfig
from scope_rt.environment_names import INTERNAL_VARIABLES, LOG_LEVEL
from scope_runners import logs
from scope_runners.main import main

RUNBOOKS = Path(__file__).parents[2] / "runbooks"


def rows(page: str) -> list[list[str]]:
    """The cells of every table row that begins with code."""
    lines = (RUNBOOKS / page).read_text().splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("| `")
    ]


def test_every_variable_is_documented_and_every_documented_one_is_read() -> None:
    names = [row[0].removesuffix(" =").strip("`") for row in rows("settings.md")]
    assert sorted(names) == sorted({*VARIABLES, LOG_LEVEL})
    page = (RUNBOOKS / "settings.md").read_text()
    assert all(f"`{name}`" in page for name in INTERNAL_VARIABLES)


def test_the_documented_defaults_are_those_of_the_reader() -> None:
    given = {}
    for name, default, *_ in rows("settings.md"):
        if re.fullmatch(r"`.+`", default):
            given[name.removesuffix(" =").strip("`")] = default.strip("`")
    assert given.pop(LOG_LEVEL) == logs.DEFAULT_LEVEL
    assert len(given) == 10
    untouched = RuntimeConfig.from_environment({})
    for name, value in given.items():
        changed = RuntimeConfig.from_environment({name: value})
        assert changed in (untouched, _with_default_cache(untouched)), name


def _with_default_cache(config: RuntimeConfig) -> RuntimeConfig:
    """The reader leaves the default cache to the stream's setup."""
    return replace(config, kv_cache="ring")


def test_the_memory_plan_that_is_shown_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (RUNBOOKS / "cache-memory.md").read_text()
    command, shown = page.split("```\n")[1].split("\n", 1)
    assert main(command.split()[1:]) == 1, "it does not fit"
    assert capsys.readouterr().out == shown
