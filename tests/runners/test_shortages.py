"""What a machine cannot hold is one sentence that says what to change, and leaves no file."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scope_contracts.errors import UserInputError
from scope_rt.control.loop import StreamLoop
from scope_rt.video.picture_format import check_recordable
from scope_runners.file_limit import check_file_limit
from scope_runners.guarded import guarded
from scope_runners.main import main
from tests.runners.streams import SHORT


def fail_with(error: BaseException) -> Callable[[], int]:
    def command() -> int:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (MemoryError(), 1, "there is not enough memory; lower --height and --width"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 1, "not enough memory"),
        (OSError(errno.EMFILE, "Too many open files"), 1, "raise its limit (ulimit -n 1024)"),
        (OSError(errno.ENAMETOOLONG, "", "aaa"), 2, "aaa: the path is too long; choose a shorter"),
        (OSError(errno.ENOSPC, "No space left on device"), 5, "output: No space left on device"),
    ],
)
def test_a_shortage_is_one_sentence(
    error: Exception, code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(fail_with(error)) == code
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


def test_what_is_no_shortage_keeps_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="a bug of ours"):
        guarded(fail_with(RuntimeError("a bug of ours")))


@pytest.mark.parametrize("kind", ["folder", "pipe"])
@pytest.mark.parametrize(
    "name",
    [
        *(".a.mp4.log", ".a.mp4.snapshot/state.1", ".a.mp4.1.partial.nut", ".a.mp4.partial.mp4"),
        *("a.mp4", "a.png", "a.json"),
    ],
)
@pytest.mark.timeout(30)
def test_a_folder_or_a_pipe_where_a_file_goes_is_refused_or_replaced_and_never_waited_for(
    name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    code = main([*SHORT, "--seconds", "0.75", "--out", str(tmp_path / "a.mp4")])
    said = capsys.readouterr().err
    is_hidden_pipe = kind == "pipe" and ".partial." in name  # ours to remove
    assert code == (0 if is_hidden_pipe else 2)
    if not is_hidden_pipe:
        assert said.count("\n") == 1
        assert str(path.parent if "state" in name else path) in said
        assert [found for found in tmp_path.rglob("*") if found.is_file()] == []


def test_a_writer_names_a_side_that_no_encoder_takes(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="height: got 20000 pixels times scale 1, want at"):
        check_recordable(tmp_path / "a.webm", width=16, height=20000, fps=16, scale=1)


def test_too_few_open_files_are_refused_by_their_limit(tmp_path: Path) -> None:
    command = 'ulimit -n 16; "$0" -m scope_runners.main stream --prompt "a red circle" "$@"'
    shell = ["sh", "-c", command, sys.executable, "--out", str(tmp_path / "a.mp4")]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert done.stderr == (
        "scope-rt: a process here may open 16 files, and 1 ranks need 40; raise the limit "
        "(ulimit -n 1024)\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_limit_that_can_be_raised_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (60, hard))
    try:
        check_file_limit(8)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 32 + 8 * 8
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_memory_that_runs_out_in_the_first_chunk_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*args: object) -> None:
        raise MemoryError

    monkeypatch.setattr(StreamLoop, "_refill", no_memory)
    assert main([*SHORT, "--out", str(tmp_path / "a.mp4")]) == 1
    assert "there is not enough memory" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
