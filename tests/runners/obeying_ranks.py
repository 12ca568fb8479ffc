"""Ranks that obey a word each, under a launcher of this process; not a test itself."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from scope_runners import launcher
from scope_runners.fork_server import TERMINATE_S, Event, RankStarted
from scope_runners.launcher import Restarts
from scope_runners.rank_group import LINGER_S, Attempt

HEEDED = (signal.SIGINT, signal.SIGHUP)
LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ([A-Z]+) launcher stream=\S+: (.*)")
BOUND_S = LINGER_S + TERMINATE_S + 2
SCRIPT = '''
import os, pathlib, signal, sys, time

def note(name):
    new = pathlib.Path(f"{name}-{os.environ['RANK']}")
    new.write_text(str(os.getpid()))
    new.rename(f"rank{os.environ['RANK']}.{name}")  # nobody reads half of it

def note_and_leave(signum, frame):
    note(signal.Signals(signum).name)
    sys.exit(100)

with open("imports", "a") as imports:
    imports.write("x")

def main(argv):
    """Each rank obeys the word at its place; of "a/b", the second from the second attempt on."""
    words = argv[int(os.environ["RANK"])].split("/")
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    word = os.environ.get("WORD", words[min(attempt, len(words) - 1)])
    told = []
    if word == "deaf":
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, lambda signum, frame: note(signal.Signals(signum).name))
    if word == "conclude":
        signal.signal(signal.SIGTERM, lambda signum, frame: told.append(signum))
    if word == "orderly":
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, note_and_leave)
    note(f"{attempt}.started")
    while len(list(pathlib.Path(".").glob(f"*.{attempt}.started"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    if word == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "last":
        return 1 if attempt < int(os.environ["TORCHELASTIC_MAX_RESTARTS"]) else 77
    if word == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if word == "conclude":
        while not told:
            time.sleep(0.01)
        note("told")
        time.sleep(0.5)
        note("concluded")
        return 9
    while word == "mourn":
        if pathlib.Path("rank0.told").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
    if word == "wrong":
        return 0 if os.environ["SCOPE_AFTER_INTEGRITY_ERROR"] == "1" else 77
    if word == "unsaid":
        return 0 if os.environ["SCOPE_AFTER_INTEGRITY_ERROR"] == "unsaid" else 77
    if word == "follow":
        return 0 if os.environ["SCOPE_RESTARTS_AFTER_PROGRESS"] == "1" else 77
    if word == "late":
        time.sleep(0.5)
        note("spoke")
    if word.isdecimal() or word == "late":
        return int(word) if word.isdecimal() else 9
    time.sleep(60)
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the module that the ranks run, in which they leave their notes."""
    (tmp_path / "obey.py").write_text(SCRIPT)
    # Whoever started the tests may have had them ignored, and this process heeds that.
    was = {signum: signal.signal(signum, signal.default_int_handler) for signum in HEEDED}
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for signum, handler in was.items():
        signal.signal(signum, handler)


def launch(*words: str) -> tuple[int, float]:
    """The exit code, and the seconds from the last rank's start to the end of the group."""
    started_s = list[float]()

    def see(number: int, event: Event) -> None:
        if isinstance(event, RankStarted):
            started_s.append(time.monotonic())

    attempt = Attempt(argv=words, num_ranks=len(words))
    code = launcher.launch_attempts("obey", lambda _: attempt, on_event=see)
    return code, time.monotonic() - started_s[-1]


def launch_again(*words: str, most: int = 3, progress: Sequence[bool] = ()) -> int:
    """Like `launch`, with restarts; `progress` is what each of them brought."""
    steps = iter(progress)
    restarts = Restarts(most=most, made_progress=lambda: next(steps, False))
    return launcher.launch("obey", words, num_ranks=len(words), restarts=restarts)


def is_running(pid_file: Path) -> bool:
    try:
        stat = Path("/proc", pid_file.read_text(), "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it may end between any two looks
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_for(condition: Callable[[], bool], *, seconds: float = 60) -> bool:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s and not condition():
        time.sleep(0.02)
    return condition()


def said(capfd: pytest.CaptureFixture[str]) -> list[str]:
    """The level and the sentence of every line that the launcher logged."""
    found = [LINE.fullmatch(line) for line in capfd.readouterr().err.splitlines()]
    return [f"{line[1]}: {line[2]}" for line in found if line is not None]


def signal_when_started(
    folder: Path, signum: signal.Signals, *, num_ranks: int, is_repeated: bool = False
) -> threading.Thread:
    """Signal this process, as a terminal would, when all ranks run."""

    def send() -> None:
        wait_for(lambda: len(list(folder.glob("*.started"))) == num_ranks)
        os.kill(os.getpid(), signum)
        if is_repeated and wait_for((folder / f"rank0.{signum.name}").exists):
            os.kill(os.getpid(), signum)  # not before: two signals that wait are one

    thread = threading.Thread(target=send)
    thread.start()
    return thread
