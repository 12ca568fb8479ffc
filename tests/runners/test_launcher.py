"""A group of ranks ends as one, within bounds, whatever happens to a rank or to the launcher."""

import os
import signal
import sys
from pathlib import Path

import pytest

from scope_runners import launcher, rank_group
from scope_runners.fork_server import TERMINATE_S, Event, ForkServer
from scope_runners.rank_group import ORDERLY_END_S, Attempt
from tests import warm_python
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


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP])
def test_a_stop_signal_is_handed_to_rank0_only(folder: Path, signum: signal.Signals) -> None:
    timer = signal_when_started(folder, signum, num_ranks=2)
    code, _ = launch("orderly", "orderly")
    timer.join()
    assert code == 100
    assert (folder / f"rank0.{signum.name}").exists()
    assert (folder / "rank1.SIGTERM").exists()
    assert not (folder / f"rank1.{signum.name}").exists()


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


def test_a_launcher_that_is_gone_with_unread_reports_cuts_short_no_orderly_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ForkServer, "_listen", lambda self: None)
    server = ForkServer("obey", os.environ, report=lambda event: None)
    place = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "0"}
    server.start(0, ["conclude"], place)
    assert wait_for((folder / "rank0.0.started").exists)
    server._orders.close()  # as the kernel does when the launcher is killed
    os.close(server._standard_input)
    assert server._process.wait(BOUND_S) == 0
    assert (folder / "rank0.concluded").exists()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_everything_at_once_with_the_code_of_that_signal(
    folder: Path, signum: signal.Signals
) -> None:
    timer = signal_when_started(folder, signum, num_ranks=2, is_repeated=True)
    code, elapsed_s = launch("deaf", "deaf")
    timer.join()
    assert code == 128 + signum, "137 would read as out of memory"
    assert elapsed_s < TERMINATE_S


@pytest.mark.parametrize(("chunk_timeout_s", "is_finished"), [(60.0, True), (0.0, False)])
def test_the_chunk_that_is_being_made_has_its_own_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch, chunk_timeout_s: float, is_finished: bool
) -> None:
    monkeypatch.setattr(rank_group, "ORDERLY_END_S", 0.1)
    monkeypatch.setattr(rank_group, "TERMINATE_S", 0.1)
    timer = signal_when_started(folder, signal.SIGTERM, num_ranks=1)
    attempt = Attempt(argv=["conclude"], num_ranks=1)
    launcher.launch_attempts("obey", lambda _: attempt, chunk_timeout_s=chunk_timeout_s)
    timer.join()
    assert (folder / "rank0.concluded").exists() == is_finished


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
    is_gone = signum == signal.SIGKILL
    assert (folder / f"rank0.{'SIGTERM' if is_gone else signum.name}").exists()


def test_a_suspended_rank_does_not_outlive_its_killed_launcher(folder: Path) -> None:
    script = "from scope_runners.launcher import launch; launch('obey', ['orderly'], num_ranks=1)"
    with warm_python.Process([sys.executable, "-c", script]) as process:
        assert wait_for(lambda: len(list(folder.glob("*.started"))) == 1)
        (note,) = folder.glob("*.started")
        os.kill(int(note.read_text()), signal.SIGSTOP)
        process.kill()
    assert wait_for(lambda: not is_running(note), seconds=BOUND_S)
