"""Ranks that are all stopped are named and replaced, and end with their launcher all the same."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from scope_runners import launcher
from scope_runners.fork_server import TERMINATE_S, is_stopped
from scope_runners.launcher import Restarts
from scope_runners.rank_group import Attempt

BOUND_S = 3.0
SCRIPT = """
import os, pathlib, signal, time

def main(argv):
    if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        return 0
    new = pathlib.Path(f"new-{os.environ['RANK']}")
    new.write_text(f"{os.getpid()} {os.getppid()}")
    new.rename(f"rank{os.environ['RANK']}")
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a module whose ranks stop themselves at their first start."""
    (tmp_path / "halt.py").write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for note in tmp_path.glob("rank*"):
        for pid in map(int, note.read_text().split()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_ranks_that_are_all_stopped_are_named_and_started_again(
    capfd: pytest.CaptureFixture[str],
) -> None:
    started_s = time.monotonic()
    code = launcher.launch_attempts(
        "halt",
        lambda number: Attempt(argv=[], num_ranks=2),
        restarts=Restarts(most=1),
        heartbeat_timeout_s=BOUND_S,
    )
    assert code == 0
    assert time.monotonic() - started_s < BOUND_S + TERMINATE_S
    said = capfd.readouterr().err
    assert "ERROR launcher " in said
    assert "ranks 0, 1: stopped (SIGSTOP) for 2." in said


def test_stopped_ranks_and_their_stopped_server_do_not_outlive_a_killed_launcher(
    folder: Path,
) -> None:
    script = "from scope_runners.launcher import launch; launch('halt', [], num_ranks=2)"
    process = subprocess.Popen([sys.executable, "-c", script])  # the kernel must know its children
    notes = [folder / "rank0", folder / "rank1"]
    try:
        assert wait_until_stopped(notes)
        ranks = [int(note.read_text().split()[0]) for note in notes]
        server = int(notes[0].read_text().split()[1])
        os.kill(server, signal.SIGSTOP)
    finally:
        process.kill()
        process.wait()
    end_s = time.monotonic() + 2 * TERMINATE_S
    while any(Path("/proc", str(pid)).exists() for pid in (*ranks, server)):
        assert time.monotonic() < end_s, "they outlive their launcher"
        time.sleep(0.05)


def wait_until_stopped(notes: list[Path]) -> bool:
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        if all(note.exists() and is_stopped(int(note.read_text().split()[0])) for note in notes):
            return True
        time.sleep(0.02)
    return False
