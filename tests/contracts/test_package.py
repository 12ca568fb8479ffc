"""The package says what it exports and needs nothing heavy."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

import scope_contracts
from scope_contracts import PPEnvelope, PPResult, ScopeError, errors

README = Path(__file__).parents[2] / "contracts" / "README.md"


def test_all_lists_every_public_name_once() -> None:
    public = {
        name
        for name, value in vars(scope_contracts).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert set(scope_contracts.__all__) == public
    assert len(scope_contracts.__all__) == len(public)


def test_every_error_is_exported_and_a_scope_error() -> None:
    classes = {n: c for n, c in vars(errors).items() if isinstance(c, type)}
    assert set(classes) <= set(scope_contracts.__all__)
    assert all(issubclass(error, ScopeError) for error in classes.values())
    assert all(error.__doc__ for error in classes.values())


def test_an_error_with_a_runbook_ends_by_naming_it() -> None:
    text = str(scope_contracts.CallCountError("chunk 7: generator call 6, budget 5"))
    assert text == "chunk 7: generator call 6, budget 5; see runbooks/hang.md"
    assert str(scope_contracts.UserInputError("no such prompt")) == "no such prompt"


@pytest.mark.parametrize(
    ("error", "runbook"),
    [
        (scope_contracts.DigestError, "drift"),
        (scope_contracts.FingerprintError, "drift"),
        (scope_contracts.DamageError, "drift"),
        (scope_contracts.SlowRankError, "rank-loss"),
        (scope_contracts.LinkTimeoutError, "hang"),
        (scope_contracts.EpochError, "drift"),
    ],
)
def test_an_error_points_where_its_reader_must_look(error: type[ScopeError], runbook: str) -> None:
    assert str(error("said")) == f"said; see runbooks/{runbook}.md"


def test_every_runbook_that_an_error_names_is_there() -> None:
    classes = [c for c in vars(errors).values() if isinstance(c, type)]
    named = {c.runbook for c in classes if issubclass(c, ScopeError)}
    there = {path.stem for path in (README.parents[1] / "runbooks").glob("*.md")}
    assert named - {None} <= there


def test_importing_the_contracts_imports_no_tensor_library() -> None:
    code = "import scope_contracts, sys; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_the_readme_names_every_module_and_no_other() -> None:
    table = README.read_text().split("| module | keeps |\n")[1].split("\n\n")[0]
    cells = [row.split(" | ")[0] for row in table.splitlines()]
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    modules = [path.stem for path in (README.parent / "scope_contracts").glob("[!_]*.py")]
    assert sorted(named) == sorted(modules)


@pytest.mark.parametrize("message", [PPEnvelope, PPResult])
def test_the_readme_explains_every_field(message: type) -> None:
    text = README.read_text()
    section = text.split(f"## {message.__name__}\n")[1].split("\n## ")[0]
    explained = {line.split("`")[1] for line in section.splitlines() if line.startswith("| `")}
    assert explained == {field.name for field in fields(message)}
