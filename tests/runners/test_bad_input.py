"""A mistake is answered with one sentence and exit code 2, before anything starts or is written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scope_runners.main import main
from tests import warm_python

PROMPT = ["--prompt", "a red circle"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--prompt", "a pink circle"], "--prompt: unknown word 'pink'"),
        ([*PROMPT, "--prompt-at", "6s:a red dog"], "--prompt-at 6s: unknown word 'dog'"),
        ([*PROMPT, "--height", "100"], "height 100 is not a positive multiple of 16; try 96"),
        ([*PROMPT, "--width", "0"], "width 0 is not a positive multiple of 16; try 16"),
        (
            [*PROMPT, "--plan", "tp_v1_1", "--tp", "3"],
            "tp 3 does not divide the model's 4 heads and 512 feed-forward channels",
        ),
        ([*PROMPT, "--tp", "2"], "use tp 1 or plan tp_v1_1, not tp 2"),
        ([*PROMPT, "--plan", "pp1", "--tp", "0"], "--tp"),
        ([*PROMPT, "--model", "no/such/folder"], "no/such/folder"),
        ([*PROMPT, "--seed", "-1"], "--seed"),
        ([*PROMPT, "--threads", "0"], "--threads"),
        ([*PROMPT, "--kv-cache-attention-bias", "2"], "bias"),
        ([*PROMPT, "--kv-cache-attention-bias", "0.0"], "bias"),
        ([*PROMPT, "--seconds", "0"], "--seconds"),
        ([*PROMPT, "--trace", "t.txt"], "t.txt"),
        ([], "--prompt"),
        ([*PROMPT, "--out", "video.avi"], "video.avi"),
        ([*PROMPT, "--out", "a" * 300 + ".mp4"], "the path is too long"),
        ([*PROMPT, "--out", "a" * 245 + ".mp4"], "the path is too long, or that of a hidden file"),
        ([*PROMPT, "--record", "a" * 300 + ".scope"], "the path is too long"),
        ([*PROMPT, "--model", "a" * 300], "the path is too long"),
        ([*PROMPT, "--out", "\udcff.mp4"], "got a path that UTF-8 cannot hold"),
        (
            [*PROMPT, "--width", "1000000000"],
            "width 1000000000 is more than 16384 pixels; lower it",
        ),
        (
            [*PROMPT, "--width", "16384"],
            "width: got 16384 pixels times scale 4, want at most 16382",
        ),
        ([*PROMPT, "--prompt", "a red circl\udcff"], "--prompt: got text that UTF-8 cannot hold"),
        (
            [*PROMPT, "--prompt-at", "1s:a red \udcff"],
            "--prompt-at 1s: got text that UTF-8 cannot hold",
        ),
    ],
)
def test_it_is_one_sentence_and_leaves_no_file(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["stream", "--out", "video.mp4", *arguments]) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert printed.err.startswith("scope-rt: ")
    assert printed.err.count("\n") == 1
    assert printed.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("SCOPE_GROUP_TIMEOUT_S", "1e10", "want a number above 0 and at most 1e+09 seconds"),
        ("SCOPE_IDLE_TIMEOUT_S", "nan", "want a number above 0 and at most 1e+09 seconds"),
        ("SCOPE_SLOW_RANK_FACTOR", "1e10", "want 0 or a number above 1 and at most 1e+09"),
        ("SCOPE_BRING_UP", "yes", "is 'yes'; set it to 0 or 1"),
        ("MASTER_PORT", "99999", "is '99999'; give a port from 1 to 65535"),
        ("MASTER_PORT", "-1", "is '-1'; give a port from 1 to 65535"),
    ],
)
def test_a_variable_that_nothing_can_use_is_refused_by_its_name(
    variable: str,
    value: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, value)
    assert main(["stream", *PROMPT, "--out", str(tmp_path / "video.mp4")]) == 2
    printed = capsys.readouterr()
    assert variable in printed.err
    assert printed.err.endswith(f"{sentence}\n")
    assert printed.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_cannot_be_written_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["stream", *PROMPT, "--out", str(tmp_path / "file" / "video.mp4")]) == 2
    assert "cannot write" in capsys.readouterr().err
    (tmp_path / "video.png").mkdir()
    assert main(["stream", *PROMPT, "--out", str(tmp_path / "video.mp4")]) == 2
    assert "video.png" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "video.png"]


def test_a_trace_may_not_take_the_name_of_the_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--out", str(tmp_path / "a.mp4"), "--trace", str(tmp_path / "a.json")]
    assert main(["stream", *PROMPT, *files]) == 2
    assert "--trace" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["sing"], ["stream", "--help-me"]])
def test_commands_are_answered_in_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1


def run(arguments: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *arguments]
    return warm_python.run(command, env=os.environ | environ, timeout=60)


def test_help_does_not_load_pytorch() -> None:
    script = "import sys; from scope_runners.main import main\ntry: main(['stream', '--help'])\n"
    script += "finally: assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", script], stdout=subprocess.DEVNULL).returncode == 0


def test_a_multi_rank_mistake_is_told_once(tmp_path: Path) -> None:
    out = str(tmp_path / "video.mp4")
    arguments = ["--plan", "pp1", "--oversubscribe", "--prompt", "a red cow", "--out", out]
    done = run(["scope_runners.main", "stream", *arguments])
    assert done.returncode == 2
    assert done.stderr.startswith("scope-rt: --prompt: unknown word 'cow'")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_too_few_processes_under_a_launcher_are_refused(tmp_path: Path) -> None:
    arguments = [*PROMPT, "--plan", "pp1", "--out", str(tmp_path / "video.mp4")]
    done = run(["scope_runners.stream", *arguments], RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    assert done.returncode == 2
    assert "needs 2 processes, got 1" in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_rank_outside_its_group_is_refused(tmp_path: Path) -> None:
    arguments = [*PROMPT, "--out", str(tmp_path / "video.mp4")]
    done = run(["scope_runners.stream", *arguments], RANK="3", WORLD_SIZE="1")
    assert done.returncode == 2
    assert "Z ERROR rank3 stream=video.mp4: UserInputError: RANK is 3 of 1 processes" in done.stderr
    assert done.stderr.count("\n") == 1
