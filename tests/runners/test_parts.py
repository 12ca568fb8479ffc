"""A model with a codec of one's own is known to every command by `--parts`, on all its ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scope_contracts.errors import UserInputError
from scope_rt.models import registry
from scope_rt.models.registry import Registry
from scope_rt.vae.codec import CodecSizes, VideoCodec
from scope_rt.vae.tiny import TinyVideoCodec
from scope_runners.main import main
from scope_runners.parts import register_parts
from tests import warm_python
from tests.tiny_folder import write_tiny_folder

PARTS = """
from scope_rt import register_codec
from scope_rt.vae.tiny import TinyVideoCodec

class MyCodec(TinyVideoCodec):
    pass

register_codec("MyCodec", MyCodec.from_pretrained, MyCodec.sizes)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a model whose codec only `my_parts` can load."""
    model = write_tiny_folder(tmp_path / "model")
    path = model / "vae" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"_class_name": "MyCodec"}))
    (tmp_path / "my_parts.py").write_text(PARTS)
    return tmp_path


def said(place: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "scope_runners.main", *words]
    return warm_python.run(command, cwd=place, timeout=90)


def test_a_stream_and_its_replay_know_the_parts_on_every_rank(place: Path) -> None:
    parts = ("--model", "model", "--parts", "my_parts", "--plan", "pp0")
    made = said(
        place,
        *("stream", "--prompt", "a red circle", "--seconds", "1", "--oversubscribe"),
        *("--out", "a.mp4", "--record", "a.scope", *parts),
    )
    assert made.returncode == 0, made.stderr
    again = said(place, "replay", "a.scope", *parts)
    assert again.returncode == 0, again.stderr


def test_the_planner_and_the_break_it_suite_know_the_parts(place: Path) -> None:
    parts = ("--model", "model", "--parts", "my_parts")
    planned = said(place, "plan-memory", *parts)
    assert planned.returncode == 0, planned.stderr
    broken = said(place, "break-it", "late-result", *parts)
    assert broken.returncode == 0, broken.stdout + broken.stderr


def test_a_process_that_is_given_the_same_parts_twice_registers_them_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codecs = Registry[VideoCodec, CodecSizes]("codec", CodecSizes)
    monkeypatch.setattr(registry, "CODECS", codecs)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "parts_given_twice.py").write_text(PARTS)
    register_parts("parts_given_twice")
    register_parts("parts_given_twice")
    with pytest.raises(UserInputError, match="'MyCodec' is registered already"):
        registry.register_codec("MyCodec", TinyVideoCodec.from_pretrained)


@pytest.mark.parametrize(
    "command",
    [
        ("stream", "--prompt", "a red circle", "--out", "a.mp4"),
        ("plan-memory",),
        ("break-it", "late-result"),
    ],
)
def test_without_them_every_command_says_once_what_is_missing(
    place: Path, command: tuple[str, ...]
) -> None:
    refused = said(place, *command, "--model", "model")
    assert refused.returncode == 2, refused.stderr
    assert refused.stderr.count("no loader for class 'MyCodec'") == 1
    assert "a module that you name with --parts" in refused.stderr
    assert not refused.stdout


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ("my_parts.py", "'my_parts.py' is no name of a module; write such as my_parts"),
        ("../my_parts", "'../my_parts' is no name of a module"),
        ("absent_parts", "cannot be imported (No module named 'absent_parts')"),
        ("broken_parts", "cannot be imported (invalid syntax (broken_parts.py, line 1))"),
    ],
)
def test_parts_that_cannot_be_imported_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    parts: str,
    sentence: str,
) -> None:
    (tmp_path / "broken_parts.py").write_text("1 +")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["plan-memory", "--model", "tiny", "--parts", parts]) == 2
    assert sentence in capsys.readouterr().err
