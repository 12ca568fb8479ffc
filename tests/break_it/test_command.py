"""The command finds faults by number, name or beginning of one, and says what it cannot do."""

import argparse
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from scope_contracts.errors import UserInputError
from scope_rt.models.family import Family
from scope_rt.models.loading import ModelFolder
from scope_runners.break_it import command
from scope_runners.break_it.catalogue import CASES, chosen
from scope_runners.break_it.command import add_break_it_arguments, run_break_it
from scope_runners.break_it.driver import Driver, recomputing_family
from scope_runners.break_it.suite import Suite
from scope_runners.main import main
from tests.tiny_folder import KREA_RECIPE


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_break_it_arguments(parser)
    return run_break_it(parser.parse_args(arguments))


def test_every_fault_is_listed_with_what_it_breaks(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert {int(line[:2]) for line in lines} == {case.number for case in CASES} | {10}
    assert {case.number for case in CASES} >= {*range(1, 44)} - {10}
    assert all(len(line.split(maxsplit=2)) == 3 and len(line) <= 120 for line in lines)


def test_a_fault_is_found_by_number_by_name_and_by_the_beginning_of_its_name() -> None:
    names = [case.name for case in chosen(["18"])]
    assert names == [case.name for case in chosen(["stop"])]
    assert len(names) == 3
    assert chosen(["stop/leader", "18"])[0].name == "stop/leader"
    assert len(chosen(["17", "kill/rank0"])) == 15


def test_every_name_stands_once_and_fits_its_column() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) <= 24


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "name a fault"),
        (["no-such-fault"], "no fault is called 'no-such-fault'"),
        (["1", "--tp", "2"], "--tp needs a --plan"),
        (["10"], "`scripts/lab recompute_experiment` of the repository measures it"),
        (["recompute-every-2"], "`scripts/lab recompute_experiment` of the repository"),
        (["kill-rank"], "no fault is called 'kill-rank', the nearest is kill/rank0;"),
        (["--detectors", "no-such-fault"], "no fault is called 'no-such-fault'"),
        (["--detectors", "disk-full"], "no detector is tried on disk-full"),
        (["--detectors", "--disarm", "heartbeat"], "drop --disarm"),
        (["--numeric", "--disarm", "rows"], "--numeric disarms each detector itself"),
        (["--numeric", "disk-full"], "none of these faults changes numbers on this plan"),
        (["rows-flip", "--kv-cache", "spiral"], "kv_cache"),
        (["1", "--model", "/nowhere"], "does not exist"),
        (["1", "--recipe", "krea-14"], "no .toml file, and 'krea-14' is no recipe"),
        (["1", "--plan", "tp_v1_1", "--tp", "3"], "tp 3 does not divide the model's 4 heads"),
    ],
)
def test_what_cannot_be_run_is_one_sentence(arguments: list[str], sentence: str) -> None:
    with pytest.raises(UserInputError, match=sentence):
        run(*arguments)


def test_a_bound_that_no_clock_can_wait_for_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["break-it", "1", "--bound", "inf"]) == 2
    assert "--bound: 'inf' is not a number above 0" in capsys.readouterr().err


def test_what_fails_before_the_first_fault_leaves_no_folder(
    suite: Suite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(model: object, given: object, into: Path) -> str:
        (into / "recipe").touch()
        raise OSError("no space is left")

    monkeypatch.setattr(command, "recomputing_family", full)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(OSError, match="no space"):
        run("1", "--model", str(suite.driver.model))
    assert list(tmp_path.iterdir()) == []


def test_when_nothing_could_be_tried_that_is_said_and_is_exit_code_1(
    suite: Suite, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = ["--plan", "single", "--model", str(suite.driver.model)]
    assert main(["break-it", "cable-cut", "stop/leader", *plan]) == 1
    out, err = capfd.readouterr()
    assert out.splitlines()[-1] == "2 runs: 2 not run (cable-cut, stop/leader)"
    assert err == "scope-rt: no fault was tried: cable-cut: not possible on this plan\n"


def test_a_fault_that_gets_through_on_a_users_plan_and_model_is_exit_code_1(
    suite: Suite, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = ["--plan", "single", "--model", str(suite.driver.model)]
    arguments = ["bias-on-the-mesh", "cable-cut", "--disarm", "state_digest", "--json"]
    assert main(["break-it", *arguments, *plan]) == 1
    bias, cut = json.loads(capfd.readouterr().out)
    assert (bias["plan"], bias["verdict"], bias["num_wrong"]) == ("single", "DRIFT", 5)
    assert bias["complaints"][0].startswith("rank 0: left, want ParityError")
    assert (cut["verdict"], cut["notes"]) == ("not run", ["not possible on this plan"])
    shutil.rmtree(Path(bias["folder"]).parent)


def test_what_finds_a_numeric_fault_is_told_on_any_plan_and_cache(
    suite: Suite, capfd: pytest.CaptureFixture[str]
) -> None:
    where = ["--plan", "single", "--kv-cache", "paged", "--model", str(suite.driver.model)]
    assert main(["break-it", "--numeric", "rows-zeros", "noise-one-rank", *where]) == 0
    *_, rule, row = capfd.readouterr().out.splitlines()
    assert rule.startswith("|---|")
    assert row.startswith("| 26 `rows-zeros` on single | `rows` | after ")
    assert row.split("|")[4] == " after 0, 0 shown wrong "
    assert "**drift**: " in row


@pytest.mark.parametrize("given", [None, "causvid-1.3b", "longlive-infinity-1.3b", "krea-14b"])
def test_every_model_has_a_recipe_that_recomputes(given: str | None, tmp_path: Path) -> None:
    family = given and replace(Family.named(given), lora=None, project=None).to_toml()
    own = str(tmp_path / "own.toml") if family else None
    if own and family:
        Path(own).write_text(family)
    model = ModelFolder.open("tiny", own)
    other = ModelFolder.open("tiny", recomputing_family(model, own, tmp_path))
    assert not other.recipe.clean_pass
    assert (other.fingerprint() == model.fingerprint()) is (not model.recipe.clean_pass)


def test_ranks_are_given_the_recipe_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drivers = list[Driver]()
    own = tmp_path / "own.toml"
    own.write_text(Family(name="own", recipe=KREA_RECIPE).to_toml())

    def tried(suite: Suite, *what: object) -> bool:
        drivers.append(suite.driver)
        return True

    monkeypatch.setattr(command, "_run_faults", tried)
    assert run("1", "--recipe", str(own)) == 0
    (driver,) = drivers
    assert driver.family == driver.recomputing_family == str(own)
    assert driver.recipe == KREA_RECIPE
