"""A group of ranks ends as one, within bounds, whatever happens to a rank or to the launcher."""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from scope_runners import launcher, rank_group
from scope_runners.exit_codes import INTEGRITY, RETRACTED
from scope_runners.fork_server import TERMINATE_S, Event, RankEnded, RankStarted
from scope_runners.launcher import Progress, Restarts
from scope_runners.rank_group import LINGER_S, ORDERLY_END_S, Attempt
from tests import warm_python

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
        signal.signal(signal.SIGTERM, note_and_leave)
        signal.signal(signal.SIGINT, note_and_leave)
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


def test_all_done_is_exit_code_0() -> None:
    assert launch("0", "0")[0] == 0


def test_a_killed_rank_ends_the_group_within_bounds(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, elapsed_s = launch("sleep", "die", "deaf")
    assert code == 128 + signal.SIGKILL
    assert elapsed_s < BOUND_S + 5
    assert not any(is_running(note) for note in folder.glob("*.started"))
    assert said(capfd) == ["WARNING: rank 1 ended by SIGKILL; stopping the other ranks"]


def test_peers_may_still_report_and_the_first_failure_counts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_group, "LINGER_S", 60.0)  # which lasts as long as a peer runs
    assert launch("late", "3")[0] == 3
    assert (folder / "rank0.spoke").exists()


def test_rank0_may_finish_after_others_were_asked_to_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_group, "LINGER_S", 0.1)
    monkeypatch.setattr(rank_group, "TERMINATE_S", 0.1)
    assert launch("conclude", "3")[0] == 3
    assert (folder / "rank0.concluded").exists()


@pytest.mark.parametrize("rank0", ["stop", "sleep", "7"])
def test_a_rank0_that_cannot_finish_is_not_waited_for(
    rank0: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_group, "LINGER_S", 0.2)
    monkeypatch.setattr(rank_group, "TERMINATE_S", 0.5)
    monkeypatch.setattr(rank_group, "ORDERLY_END_S", 10_000.0)
    assert launch(rank0, "3", "deaf")[0] in (3, 7)
    assert not any(is_running(note) for note in folder.glob("*.started"))


def test_a_rank_that_stays_behind_a_finished_rank0_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_group, "ORDERLY_END_S", 0.5)
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


def test_a_rank_that_dies_does_not_cut_short_an_orderly_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_group, "LINGER_S", 0.1)
    timer = signal_when_started(folder, signal.SIGTERM, num_ranks=2)
    launch_again("conclude", "mourn")
    timer.join()
    assert (folder / "rank0.concluded").exists()
    assert not list(folder.glob("*.1.started"))


def test_a_signal_ignored_at_start_ends_nothing() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does

    def hang_up(number: int, event: Event) -> None:
        signal.raise_signal(signal.SIGHUP)

    attempt = Attempt(argv=["late"], num_ranks=1)
    assert launcher.launch_attempts("obey", lambda _: attempt, on_event=hang_up) == 9


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_everything_at_once_with_the_code_of_that_signal(
    folder: Path, signum: signal.Signals
) -> None:
    timer = signal_when_started(folder, signum, num_ranks=2, is_repeated=True)
    code, elapsed_s = launch("deaf", "deaf")
    timer.join()
    assert code == 128 + signum, "137 would read as out of memory"
    assert elapsed_s < TERMINATE_S


def test_a_rank_that_was_killed_during_an_orderly_end_is_told_from_one_that_we_ended(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_group, "ORDERLY_END_S", 10_000.0)
    timer = signal_when_started(folder, signal.SIGTERM, num_ranks=2)
    assert launch("conclude", "mourn")[0] == 128 + signal.SIGKILL
    timer.join()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGHUP])
def test_no_rank_outlives_its_launcher(folder: Path, signum: signal.Signals) -> None:
    script = "from scope_runners.launcher import launch; "
    script += "launch('obey', ['orderly', 'deaf'], num_ranks=2)"
    with warm_python.Process([sys.executable, "-c", script]) as process:
        assert wait_for(lambda: len(list(folder.glob("*.started"))) == 2)
        process.send_signal(signum)
        process.wait(timeout=ORDERLY_END_S + BOUND_S)
    notes = list(folder.glob("*.started"))
    assert wait_for(lambda: not any(map(is_running, notes)), seconds=BOUND_S)
    assert (folder / "rank0.SIGTERM").exists()


def test_a_suspended_rank_does_not_outlive_its_killed_launcher(folder: Path) -> None:
    script = "from scope_runners.launcher import launch; launch('obey', ['orderly'], num_ranks=1)"
    with warm_python.Process([sys.executable, "-c", script]) as process:
        assert wait_for(lambda: len(list(folder.glob("*.started"))) == 1)
        (note,) = folder.glob("*.started")
        os.kill(int(note.read_text()), signal.SIGSTOP)
        process.kill()
    assert wait_for(lambda: not is_running(note), seconds=BOUND_S)


def test_a_lost_rank_restarts_all_and_a_suspended_peer_does_not_outlive_it(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch_again("sleep/0", "die/0", "stop/0") == 0
    assert not any(is_running(note) for note in folder.glob("*.started"))
    assert said(capfd) == ["WARNING: rank 1 ended by SIGKILL; starting again (1 of 3)"]
    assert (folder / "imports").read_text() == "x", "a restart imports nothing again"


def test_a_group_is_not_restarted_without_end_when_starts_bring_no_progress(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch_again("7", most=2, progress=[False, True, False, False]) == 7
    assert len(list(folder.glob("*.started"))) == 4
    assert said(capfd) == [
        "WARNING: rank 0 was the first to fail; starting again (1 of 2)",
        "WARNING: rank 0 was the first to fail; starting again (1 of 2)",
        "WARNING: rank 0 was the first to fail; starting again (2 of 2)",
        "ERROR: rank 0 was the first to fail; 2 starts brought the stream no further",
    ]


def test_an_error_of_integrity_that_comes_again_is_not_tried_a_third_time(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch_again("4", most=3, progress=[True, False]) == INTEGRITY
    assert len(list(folder.glob("*.started"))) == 2
    assert said(capfd)[1:] == [
        "ERROR: rank 0 was the first to end by an error of integrity, as the start before; no "
        "start brings the stream further"
    ]


def test_after_a_loss_or_progress_an_error_of_integrity_is_tried_again(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch_again("4/7/4/4/0", most=9, progress=[True, False, False, True]) == 0
    assert len(list(folder.glob("*.started"))) == 5


def test_a_rank_knows_that_the_start_before_was_wrong() -> None:
    assert launch_again("4/wrong", most=3) == 0
    assert launch_again("7/wrong", most=1) == 77


def test_a_complete_stream_with_retractions_keeps_its_code_and_is_not_made_again(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch_again("3", "0") == RETRACTED == 3
    assert len(list(folder.glob("rank0.*.started"))) == 1
    assert said(capfd) == []


def test_rank0_has_time_to_retract_what_another_rank_found_wrong(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_group, "LINGER_S", 0.1)
    assert launch_again("late/0", f"{INTEGRITY}/0") == 0
    assert (folder / "rank0.spoke").exists()
    assert said(capfd) == [
        "WARNING: rank 1 was the first to end by an error of integrity; starting again (1 of 3)"
    ]


def test_rank0_has_time_to_retract_what_a_survivor_of_a_loss_found_wrong(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_group, "LINGER_S", 0.3)
    assert launch_again("late/0", "die/0", f"{INTEGRITY}/0") == 0
    assert (folder / "rank0.spoke").exists()


def test_a_rank_knows_whether_another_attempt_follows(folder: Path) -> None:
    assert launch_again("last", most=2) == 77
    assert len(list(folder.glob("*.started"))) == 3
    assert launch("last")[0] == 77


def test_a_rank_knows_whether_another_attempt_follows_progress() -> None:
    assert launch_again("follow", most=1) == 0
    assert launch_again("follow", most=0) == 77
    starts_alone = Restarts(most=1)
    assert launcher.launch("obey", ["follow"], num_ranks=1, restarts=starts_alone) == 77


def test_only_a_count_that_rose_above_all_before_is_progress() -> None:
    counts = iter([3, 3, 5, 4, 5, 6])
    progress = Progress(lambda: next(counts))
    assert [progress.has_risen() for _ in range(5)] == [False, True, False, False, True]


@pytest.mark.parametrize(("words", "code"), [(("2",), 2), (("130",), 130), (("0", "late"), 9)])
def test_after_bad_input_obeyed_signals_or_a_finished_rank0_no_attempt_follows(
    folder: Path, words: tuple[str, ...], code: int
) -> None:
    assert launch_again(*words) == code
    assert len(list(folder.glob("*.started"))) == len(words)


def test_ctrl_c_causes_no_restart(folder: Path) -> None:
    timer = signal_when_started(folder, signal.SIGINT, num_ranks=2)
    assert launch_again("orderly", "orderly") == 100
    timer.join()
    assert len(list(folder.glob("*.started"))) == 2


def test_the_next_attempt_may_run_on_fewer_ranks_with_other_variables(folder: Path) -> None:
    attempts = [
        Attempt(argv=["sleep", "sleep", "die"], num_ranks=3),
        Attempt(argv=["0", "die"], num_ranks=2, environ_of=lambda rank: {"WORD": "0"}),
    ]
    events: list[tuple[int, Event]] = []
    code = launcher.launch_attempts(
        "obey",
        lambda number: attempts[number],
        restarts=Restarts(most=1),
        on_event=lambda number, event: events.append((number, event)),
    )
    assert code == 0
    assert sorted(note.name for note in folder.glob("*.1.started")) == [
        "rank0.1.started",
        "rank1.1.started",
    ]
    ended = {(number, e.rank, e.code) for number, e in events if isinstance(e, RankEnded)}
    assert ended == {(0, 0, -9), (0, 1, -9), (0, 2, -9), (1, 0, 0), (1, 1, 0)}
    started = [(number, e.rank) for number, e in events if isinstance(e, RankStarted)]
    assert started == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


def lose_fork_server(folder: Path, lose: Callable[[int, int], None]) -> None:
    """Two ranks lose their server by `lose(server, rank0)`, and are ended and started again."""
    started = list[int]()

    def see(number: int, event: Event) -> None:
        if isinstance(event, RankStarted):
            started.append(event.pid)

    def lose_when_started() -> None:
        # Both: the launcher cannot signal a rank that it has not been told of yet.
        assert wait_for(lambda: len(started) == len(list(folder.glob("*.started"))) == 2)
        stat = Path("/proc", str(started[0]), "stat").read_text()
        lose(int(stat.rpartition(")")[2].split()[1]), started[0])

    thread = threading.Thread(target=lose_when_started)
    thread.start()
    attempt = Attempt(argv=["sleep/0", "deaf/0"], num_ranks=2)
    restarts = Restarts(most=3)
    code = launcher.launch_attempts("obey", lambda _: attempt, restarts=restarts, on_event=see)
    thread.join()
    assert code == 0
    assert not any(is_running(note) for note in folder.glob("*.started"))


def test_the_ranks_of_a_killed_fork_server_are_ended_and_started_again(folder: Path) -> None:
    lose_fork_server(folder, lambda server, rank0: os.kill(server, signal.SIGKILL))


def test_a_suspended_fork_server_does_not_hold_up_the_launcher(folder: Path) -> None:
    def stop(server: int, rank0: int) -> None:
        os.kill(server, signal.SIGSTOP)
        os.kill(rank0, signal.SIGKILL)

    lose_fork_server(folder, stop)


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
