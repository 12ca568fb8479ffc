"""A group of ranks ends as one, within bounds, whatever happens to a rank or to the launcher."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from scope_runners import launcher

BOUND_S = launcher.LINGER_S + launcher.TERMINATE_S + 2
SCRIPT = '''
import os, pathlib, signal, sys, time

def note(name):
    pathlib.Path(f"rank{os.environ['RANK']}.{name}").write_text(str(os.getpid()))

def note_and_leave(signum, frame):
    note(signal.Signals(signum).name)
    sys.exit(100)

def main(argv):
    """Each rank obeys the word at its place."""
    word = argv[int(os.environ["RANK"])]
    if word == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if word == "orderly":
        signal.signal(signal.SIGTERM, note_and_leave)
        signal.signal(signal.SIGINT, note_and_leave)
    note("started")
    while len(list(pathlib.Path(".").glob("*.started"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    if word == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "late":
        time.sleep(0.5)
        note("spoke")
    if word.isdecimal() or word == "late":
        return int(word) if word.isdecimal() else 9
    time.sleep(60)
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the module that the ranks run, in which they leave their notes."""
    (tmp_path / "obey.py").write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def launch(*words: str) -> tuple[int, float]:
    """The exit code, and the seconds from the start to the end of the group."""
    start_s = time.monotonic()
    code = launcher.launch("obey", words, num_ranks=len(words))
    return code, time.monotonic() - start_s


def is_running(pid_file: Path) -> bool:
    stat = Path("/proc", pid_file.read_text(), "stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_for(condition: Callable[[], bool], *, seconds: float) -> bool:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s and not condition():
        time.sleep(0.02)
    return condition()


def test_all_done_is_exit_code_0() -> None:
    assert launch("0", "0")[0] == 0


def test_a_killed_rank_ends_the_group_within_bounds(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, elapsed_s = launch("sleep", "die", "deaf")
    assert code == 128 + signal.SIGKILL
    assert elapsed_s < BOUND_S + 5
    assert not any(is_running(note) for note in folder.glob("*.started"))
    assert capfd.readouterr().err == "rank 1: ended by SIGKILL; stopping the other ranks\n"


def test_peers_may_still_speak_and_the_first_failure_counts(folder: Path) -> None:
    assert launch("late", "3")[0] == 3
    assert (folder / "rank0.spoke").exists()


def test_a_rank_that_stays_behind_a_finished_rank0_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launcher, "ORDERLY_END_S", 0.5)
    code, elapsed_s = launch("0", "sleep")
    assert code == 128 + signal.SIGTERM
    assert elapsed_s < BOUND_S


def test_ctrl_c_is_handed_to_rank0_only(folder: Path) -> None:
    timer = signal_when_started(folder, signal.SIGINT, num_ranks=2)
    code, _ = launch("orderly", "orderly")
    timer.join()
    assert code == 100
    assert (folder / "rank0.SIGINT").exists()
    assert (folder / "rank1.SIGTERM").exists()
    assert not (folder / "rank1.SIGINT").exists()


def test_a_second_ctrl_c_ends_everything_at_once(folder: Path) -> None:
    timer = signal_when_started(folder, signal.SIGTERM, num_ranks=1, times=2)
    code, elapsed_s = launch("deaf")
    timer.join()
    assert code == 128 + signal.SIGKILL
    assert elapsed_s < launcher.TERMINATE_S


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGHUP])
def test_no_rank_outlives_its_launcher(folder: Path, signum: signal.Signals) -> None:
    script = "from scope_runners.launcher import launch; "
    script += "launch('obey', ['orderly', 'deaf'], num_ranks=2)"
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        assert wait_for(lambda: len(list(folder.glob("*.started"))) == 2, seconds=20)
        process.send_signal(signum)
        process.wait(timeout=launcher.ORDERLY_END_S + BOUND_S)
    notes = list(folder.glob("*.started"))
    assert wait_for(lambda: not any(map(is_running, notes)), seconds=BOUND_S)
    assert (folder / "rank0.SIGTERM").exists()


def signal_when_started(
    folder: Path, signum: signal.Signals, *, num_ranks: int, times: int = 1
) -> threading.Thread:
    """Signal this process, as a terminal would, when all ranks run."""

    def send() -> None:
        wait_for(lambda: len(list(folder.glob("*.started"))) == num_ranks, seconds=20)
        for _ in range(times):
            os.kill(os.getpid(), signum)
            time.sleep(0.2)

    thread = threading.Thread(target=send)
    thread.start()
    return thread
