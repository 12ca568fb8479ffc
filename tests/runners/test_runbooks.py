"""The tables of the runbooks say what the code does."""

import re
import signal
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from scope_contracts import errors
from scope_rt.config import StreamConfig, variables
from scope_rt.environment_names import (
    INTERNAL_VARIABLES,
    LOG_LEVEL,
    PER_PROCESS_VARIABLES,
)
from scope_runners import exit_codes, logs
from scope_runners.main import main
from scope_runners.stop_request import STOPPING

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
    assert sorted(names) == sorted({*variables(), *PER_PROCESS_VARIABLES})
    page = (RUNBOOKS / "settings.md").read_text()
    assert all(f"`{name}`" in page for name in INTERNAL_VARIABLES)


def test_the_documented_defaults_are_those_of_the_reader() -> None:
    given = {}
    for name, default, *_ in rows("settings.md"):
        if re.fullmatch(r"`.+`", default):
            given[name.removesuffix(" =").strip("`")] = default.strip("`")
    assert given.pop(LOG_LEVEL) == logs.DEFAULT_LEVEL
    assert len(given) == 12
    untouched = StreamConfig.load(environ={})
    for name, value in given.items():
        assert StreamConfig.load(environ={name: value}) == untouched, name


def test_the_memory_plan_that_is_shown_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (RUNBOOKS / "cache-memory.md").read_text()
    command, shown = page.split("```\n")[1].split("\n", 1)
    assert main(command.split()[1:]) == 1, "it does not fit"
    assert capsys.readouterr().out == shown


def test_every_exit_code_is_documented_by_its_name() -> None:
    documented = {int(code.strip("`")): rest for code, *rest in rows("exit-codes.md")}
    named = {name: code for name, code in vars(exit_codes).items() if name.isupper()}
    for name, code in named.items():
        assert f"`{name}`" in documented[code][0], name
    for code, (name, *_) in documented.items():
        if code > 128:
            assert signal.Signals(code - 128).name in name
        else:
            assert code == 0 or code in named.values()
    heeded = {128 + signum for signum in STOPPING}
    assert heeded | {128 + signal.SIGPIPE, 128 + signal.SIGKILL} <= documented.keys()


WORDS_TO_EXPLAIN = (
    "mesh, rank0, leader, sink, window, epoch, chunk, latent frame, clean pass, recompute, r1, "
    "r0a, r0, conditioning, envelope, preflight, lifecycle, digest, snapshot, resume point, "
    "acknowledged, pending, segment, plan, anchor, gist, recipe, transition, hard cut, fork server"
)


def test_the_glossary_explains_each_word_once() -> None:
    lines = (RUNBOOKS / "glossary.md").read_text().splitlines()
    heads = [line.split("|")[1].strip() for line in lines if line.startswith("| ")]
    words = [word for head in heads for word in head.split(", ") if word != "word"]
    assert len(words) == len(set(words))
    assert set(WORDS_TO_EXPLAIN.split(", ")) <= {word.partition(" (")[0] for word in words}


PAGES = sorted(page.relative_to(RUNBOOKS).as_posix() for page in RUNBOOKS.glob("*.md"))
REFERENCE = ["glossary.md"]
"""Pages that answer no symptom."""


@pytest.mark.parametrize("page", [page for page in PAGES if page not in REFERENCE])
def test_a_page_has_its_parts_in_order(page: str) -> None:
    text = (RUNBOOKS / page).read_text()
    places = [text.find(part) for part in PARTS]
    assert -1 not in places, f"lacks {PARTS[places.index(-1)]}"
    assert places == sorted(places)
    assert "\nAnswers " in text.split("**Symptom.**")[0]


PARTS = ("**Symptom.**", "**First look.**", "Cause and fix", "**Proof.**")


def errors_of(kind: type[errors.ScopeError]) -> Iterator[type[errors.ScopeError]]:
    yield kind
    for narrower in kind.__subclasses__():
        yield from errors_of(narrower)


OURS = [kind for kind in errors_of(errors.ScopeError) if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("error", [kind for kind in OURS if kind.runbook], ids=lambda e: e.__name__)
def test_the_page_that_an_error_points_to_says_that_it_answers_it(
    error: type[errors.ScopeError],
) -> None:
    answers = (RUNBOOKS / f"{error.runbook}.md").read_text().split("**Symptom.**")[0]
    named = [kind for kind in error.__mro__ if f"`{kind.__name__}`" in answers]
    assert named or "every `LifecycleError`" in answers


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_no_error_that_does_not_exist(page: str) -> None:
    named = set(re.findall(r"`([A-Z]\w+Error)\b", (RUNBOOKS / page).read_text()))
    torchrun = {"RendezvousConnectionError", "RendezvousClosedError"}
    assert named <= {kind.__name__ for kind in OURS} | torchrun


def test_every_setting_of_the_configuration_file_is_documented() -> None:
    page = (RUNBOOKS / "settings.md").read_text()
    documented = {
        table: set(re.findall(r"`(\w+)`", names))
        for table, names in re.findall(r"^\| \[(\w+)\] \| (.*) \|$", page, re.M)
    }
    config = StreamConfig()
    assert documented == {
        part.name: {
            setting.name
            for setting in fields(getattr(config, part.name))
            if not setting.metadata["by_variable_only"]
        }
        for part in fields(config)
    }


def test_the_configuration_file_that_is_shown_can_be_read(tmp_path: Path) -> None:
    (shown,) = re.findall(r"```toml\n(.*?)```", (RUNBOOKS / "settings.md").read_text(), re.S)
    (tmp_path / "stream.toml").write_text(shown)
    config = StreamConfig.load(file=tmp_path / "stream.toml", environ={})
    assert "plan=pp1" in config.in_effect()
    assert config.mesh.heartbeat_timeout_s == 5
