"""After a loss all ranks are started again, unless that brings the stream no further."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from scope_runners import launcher, rank_group
from scope_runners.exit_codes import INTEGRITY, RETRACTED
from scope_runners.fork_server import Event, RankEnded, RankStarted
from scope_runners.launcher import Progress, Restarts
from scope_runners.rank_group import Attempt
from tests.runners.obeying_ranks import (
    BOUND_S,
    folder,
    is_running,
    launch,
    launch_again,
    said,
    signal_when_started,
    wait_for,
)

__all__ = ["folder"]


def test_a_lost_rank_restarts_all_and_a_suspended_peer_does_not_outlive_it(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch_again("sleep/0", "die/0", "stop/0") == 0
    assert not any(is_running(note) for note in folder.glob("*.started"))
    assert said(capfd) == ["WARNING: rank 1 ended by SIGKILL; starting again (1 of 3)"]
    assert (folder / "imports").read_text() == "x", "a restart imports nothing again"


def test_a_rank_that_was_stopped_is_named_and_not_the_one_that_ended_because_of_it(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch_again("late/0", "sleep/0", "stop/0") == 0
    assert said(capfd) == ["WARNING: rank 2 was stopped (SIGSTOP); starting again (1 of 3)"]


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


def test_what_nobody_has_retracted_is_told_to_each_start_until_one_brings_the_stream_further() -> (
    None
):
    """A start may be lost before it could retract what the one before could not."""
    lost = ("late/die/unsaid", f"{INTEGRITY}/sleep/0")
    assert launch_again(*lost) == 0
    assert launch_again(*lost, progress=[False, True], most=2) == 77


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


@pytest.mark.parametrize(
    ("words", "code"), [(("2",), 2), (("5",), 5), (("130",), 130), (("0", "late"), 9)]
)
def test_after_bad_input_a_full_disk_obeyed_signals_or_a_finished_rank0_no_attempt_follows(
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
    # Nobody can wait for ranks whose parent is gone: a busy machine ends them a moment later.
    notes = list(folder.glob("*.started"))
    assert wait_for(lambda: not any(map(is_running, notes)), seconds=BOUND_S)


def test_the_ranks_of_a_killed_fork_server_are_ended_and_started_again(folder: Path) -> None:
    lose_fork_server(folder, lambda server, rank0: os.kill(server, signal.SIGKILL))


def test_a_suspended_fork_server_does_not_hold_up_the_launcher(folder: Path) -> None:
    def stop(server: int, rank0: int) -> None:
        os.kill(server, signal.SIGSTOP)
        os.kill(rank0, signal.SIGKILL)

    lose_fork_server(folder, stop)
