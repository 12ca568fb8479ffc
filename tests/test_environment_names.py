from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from scope_rt.config import StreamConfig, variables
from scope_rt.environment_names import (
    INTERNAL_VARIABLES,
    SECRET,
    SECRET_FILE,
    unknown_variables,
)
from scope_rt.launch_environment import LaunchEnvironment
from scope_runners.break_it.instruments import instruments_from_environment
from scope_runners.main import main


class Noting(Mapping[str, str]):
    """An empty environment that remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> str:
        self.asked.add(name)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def test_the_known_variables_are_those_that_are_read() -> None:
    environ = Noting()
    StreamConfig.load(environ=environ)
    LaunchEnvironment.from_environment(environ)
    instruments_from_environment(environ)
    read = {name for name in environ.asked if name.startswith("SCOPE_")}
    assert read == variables().keys() | INTERNAL_VARIABLES | {SECRET, SECRET_FILE}


def test_an_unknown_variable_is_given_with_the_nearest_known_one() -> None:
    environ = {
        "SCOPE_HEARTBEAT_TIMEOUT": "5",
        "SCOPE_KVCACHE": "ring",
        "SCOPE_COLOUR": "red",
        "SCOPE_KV_CACHE": "ring",
        "SCOPE_FAULTS": "",
        "SCOPED": "",
        "scope_kv_cache": "",
    }
    assert unknown_variables(environ, variables()) == {
        "SCOPE_COLOUR": "",
        "SCOPE_HEARTBEAT_TIMEOUT": "SCOPE_HEARTBEAT_TIMEOUT_S",
        "SCOPE_KVCACHE": "SCOPE_KV_CACHE",
    }


@pytest.mark.parametrize(
    ("variable", "advice"),
    [
        ("SCOPE_HEARTBEAT_TIMEOUT", "did you mean SCOPE_HEARTBEAT_TIMEOUT_S?"),
        ("SCOPE_SLOW_RANKS_FACTOR", "did you mean SCOPE_SLOW_RANK_FACTOR?"),
        ("SCOPE_COLOUR", "unset it;"),
    ],
)
def test_a_misspelt_variable_is_refused_by_its_name(
    variable: str,
    advice: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, "1")
    assert main(["stream", "--prompt", "a red circle", "--out", str(tmp_path / "v.mp4")]) == 2
    sentence = f"{variable} is no variable of scope-rt; {advice} runbooks/settings.md lists all"
    assert capsys.readouterr().err == f"scope-rt: {sentence}\n"
    assert not any(tmp_path.iterdir())
