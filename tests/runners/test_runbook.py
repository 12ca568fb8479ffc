"""An error's runbook can be read by the name that the error gives it."""

from pathlib import Path

import pytest

from scope_contracts.errors import CallCountError, UserInputError
from scope_runners.guarded import guarded
from scope_runners.main import main

RUNBOOKS = Path(__file__).parents[2] / "runbooks"


@pytest.mark.parametrize("name", ["hang", "hang.md", "runbooks/hang.md"])
def test_a_page_is_found_by_every_way_to_write_its_name(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runbook", name]) == 0
    assert capsys.readouterr().out == (RUNBOOKS / "hang.md").read_text()


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("your-own-model", "guides/your-own-model"),
        ("guides/your-own-model", "guides/your-own-model"),
        ("PeerLostError", "rank-loss"),
        ("LinkTimeoutError", "hang"),
        ("EpochError", "drift"),
        ("PreflightError", "drift"),
        ("CacheError", "cache-memory"),
        ("UserInputError", "settings"),
    ],
)
def test_a_page_is_found_by_its_file_or_by_an_error_it_answers(
    name: str, page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runbook", name]) == 0
    assert capsys.readouterr().out == (RUNBOOKS / f"{page}.md").read_text()


def test_all_pages_are_listed_with_their_titles(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runbook"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == len(list(RUNBOOKS.rglob("*.md")))
    (hang,) = (line for line in listed if line.startswith("hang "))
    assert hang.endswith("  A stream stopped, or a rank is gone")
    titles_at = hang.index("A stream")
    assert all(line[titles_at - 1].isspace() for line in listed), "titles stand in one column"
    assert not any(line[titles_at].isspace() for line in listed)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("hung", ", the nearest is hang"),
        ("../README", ""),
        ("", ""),
        ("hang/", ", the nearest is hang"),
        ("guides/", ", the nearest is guides/serving"),
        ("WireError", ""),
        ("Callable", ""),
    ],
)
def test_an_unknown_page_is_refused_with_the_names_of_all(
    name: str, nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runbook", name]) == 2
    error = capsys.readouterr().err
    said = f"scope-rt: no runbook is called {name!r}{nearest}; there are bring-up, "
    assert error.startswith(said)


def test_a_command_that_cites_a_runbook_says_how_to_read_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> int:
        raise CallCountError("chunk 7: generator call 6, budget 5")

    assert guarded(fail) == 1
    error = capsys.readouterr().err
    assert error.endswith("; see runbooks/hang.md (scope-rt runbook hang)\n")
    assert error.count("\n") == 1


def test_an_error_without_a_runbook_stays_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise UserInputError("no such prompt")

    assert guarded(fail) == 2
    assert capsys.readouterr().err == "scope-rt: no such prompt\n"
