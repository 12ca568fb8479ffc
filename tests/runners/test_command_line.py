"""What was mistyped is named first, and versions are printed without loading PyTorch."""

import platform
import subprocess
import sys
from importlib.metadata import version

import pytest

from scope_rt.version import __version__
from scope_runners.main import COMMANDS, main


def test_the_versions_are_printed_without_loading_pytorch() -> None:
    script = "import sys; from scope_runners.main import main\ntry: main(['--version'])\n"
    script += "finally: assert 'torch' not in sys.modules"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    torch, python = version("torch"), platform.python_version()
    assert run.stdout == f"scope-rt {__version__}, torch {torch}, Python {python}\n"
    assert run.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("stream --promt red", "there is no option '--promt', the nearest is --prompt"),
        ("stream --promt=red", "there is no option '--promt', the nearest is --prompt"),
        ("inspect --pictures a.png", "there is no option '--pictures', the nearest is --picture"),
        ("replay --tollerance 1", "there is no option '--tollerance', the nearest is --tolerance"),
        ("plan-memory --gpus h100", "there is no option '--gpus', the nearest is --gpu"),
        ("break-it --al", "there is no option '--al', the nearest is --all"),
        ("stream -o video.mp4", "there is no option '-o'"),
        ("--verbose stream", "there is no option '--verbose', the nearest is --version"),
        ("strem --prompt red", "there is no command 'strem', the nearest is stream"),
    ],
)
def test_what_is_unknown_is_named_before_what_is_missing(
    arguments: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == 2
    command = arguments.split()[0]
    asked = f"scope-rt {command}" if command in COMMANDS else "scope-rt"
    assert capsys.readouterr().err == f"scope-rt: {sentence}; see {asked} --help\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_an_option_is_never_guessed_from_its_beginning(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--hel"]) == 2
    assert "there is no option '--hel', the nearest is --help" in capsys.readouterr().err


def test_a_value_may_look_like_an_option_or_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stream", "--prompt", "--a red circle", "--seconds", "-3"]) == 2
    assert "'-3' is no time" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("serve --port abc", "--port: give a whole number, not 'abc'"),
        ("serve --lease long", "--lease: give a number, not 'long'"),
        ("stream --plan pp7", "--plan: 'pp7' is not one of single, "),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_without_names_of_python(
    arguments: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == 2
    assert capsys.readouterr().err.startswith(f"scope-rt: {sentence}")
