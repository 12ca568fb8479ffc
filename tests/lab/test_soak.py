"""A soak refuses what cannot run, tells when it was given up, and calls flat what it watched."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from scope_lab.main import main as lab
from scope_lab.soak import fault_injector, run
from scope_lab.soak.event_log import MemorySampled
from scope_lab.soak.memory import LAUNCHER, LONG_S, MOST_GROWTH_BYTES, complaints, growths, watched
from scope_lab.soak.recovery import untried
from scope_lab.soak.schedule import FaultKind, PlannedFault
from scope_rt.faults import FaultPoint
from scope_runners.break_it.faults import at
from scope_runners.launcher import Restarts
from tests.tiny_folder import write_tiny_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SOAK_FOLDER", "SCOPE_HEARTBEAT_TIMEOUT_S", "SCOPE_START_TIMEOUT_S"):
        monkeypatch.setenv(name, "1")  # which the soak sets


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--minutes", "nan"], "--minutes: 'nan' is not a number above 0"),
        (["--minutes", "inf"], "--minutes: 'inf' is not a number above 0"),
        (["--minutes", "1e9"], "--minutes: '1e9' is not a number above 0, 1,000,000 at most"),
        (["--minutes", "an hour"], "--minutes: 'an hour' is not a number above 0"),
        (["--fault-every", "0"], "--fault-every: '0' is not a number above 0"),
        (["--cue-every", "-1"], "--cue-every: '-1' is not a number above 0"),
        (["--tp", "3"], "tp 3 does not divide the model's 4 heads"),
        (["--plan", "single", "--tp", "2"], "plan single runs in one process"),
    ],
)
def test_a_bad_argument_is_one_sentence_and_leaves_no_folder(
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    sentence: str,
) -> None:
    folder = tmp_path / "soak"
    assert lab(["soak", "--model", str(model), "--out", str(folder), *arguments]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
    assert not folder.exists()


def test_a_folder_that_is_a_file_or_holds_something_is_refused_and_left_as_it_is(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    for out, sentence in (
        (notes, "is not an empty folder; choose another --out, or add --resume"),
        (tmp_path, "is not an empty folder; choose another --out, or add --resume"),
        (notes / "soak", "(Not a directory); choose another --out"),
    ):
        assert lab(["soak", "--model", str(model), "--out", str(out)]) == 2
        assert sentence in capsys.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


@pytest.fixture
def strays() -> Iterator[list[int]]:
    """Signals that reached this process while no launcher took them."""
    strays = list[int]()
    before = signal.signal(signal.SIGTERM, lambda signum, frame: strays.append(signum))
    yield strays
    signal.signal(signal.SIGTERM, before)


class StuckLauncher:
    """Its ranks show nothing, and it ends when it was asked to `num_asked` times."""

    def __init__(self, *, num_asked: int) -> None:
        self._num_asked, self._asked, self._kill = num_asked, SimpleQueue[int](), os.kill
        self._listens, self._was_asked = threading.Event(), threading.Event()

    def __call__(self, *what: object, **how: object) -> int:
        before = signal.signal(signal.SIGTERM, self._hear)
        self._listens.set()
        try:
            for _ in range(self._num_asked):
                self._asked.get(timeout=30)
        finally:
            signal.signal(signal.SIGTERM, before)
        time.sleep(4 * fault_injector.ASK_S)
        return 128 + signal.SIGTERM

    def kill(self, pid: int, signum: int) -> None:
        """`os.kill`, to a launcher that listens; and not again before it has heard the first time,
        since two signals that wait are one."""
        assert self._listens.wait(30)
        self._kill(pid, signum)
        assert self._was_asked.wait(30)

    def _hear(self, signum: int, frame: object) -> None:
        self._asked.put(signum)
        self._was_asked.set()


@pytest.mark.parametrize("num_asked", [1, 2])
def test_a_soak_in_which_nothing_moves_is_given_up_with_a_report_and_not_interrupted(
    model: Path,
    tmp_path: Path,
    strays: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    num_asked: int,
) -> None:
    monkeypatch.setattr(fault_injector, "STALL_S", 0.2)
    monkeypatch.setattr(fault_injector, "ASK_S", 0.1)
    stuck, close = StuckLauncher(num_asked=num_asked), fault_injector.FaultInjector.close

    def close_at_last(breaker: fault_injector.FaultInjector) -> None:
        close(breaker)
        breaker._thread.join(30)  # which `STALL_S` bounds too

    monkeypatch.setattr(fault_injector.FaultInjector, "close", close_at_last)
    monkeypatch.setattr(os, "kill", stuck.kill)
    monkeypatch.setattr(run, "launch_attempts", stuck)
    monkeypatch.setattr(run, "replayed", lambda *what, **how: None)
    folder = tmp_path / "soak"
    arguments = ["--model", str(model), "--minutes", "0.2", "--plan", "pp1", "--tp", "1"]
    assert lab(["soak", *arguments, "--out", str(folder)]) == 1
    told = capsys.readouterr()
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    assert not report["passed"]
    assert "no new chunk for 0.2 s; the soak was given up" in report["complaints"]
    assert any("cannot read the recording" in said for said in report["complaints"])
    assert "FAILED     no new chunk for 0.2 s; the soak was given up" in told.out
    assert "interrupted" not in told.err
    assert strays == []


def test_a_soak_whose_ranks_are_started_in_vain_has_failed_and_was_not_interrupted(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(
        module: str, attempt_of: Callable[[int], object], *, restarts: Restarts, **how: object
    ) -> int:
        for number in range(restarts.most):
            attempt_of(number)
            assert restarts.made_progress is not None
            assert not restarts.made_progress()
        return 128 + signal.SIGKILL

    monkeypatch.setattr(run, "launch_attempts", launch)
    monkeypatch.setattr(run, "replayed", lambda *what, **how: None)
    folder = tmp_path / "soak"
    assert lab(["soak", "--model", str(model), "--minutes", "0.2", "--out", str(folder)]) == 1
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    assert "the launcher ended with 1" in report["complaints"]


def test_a_soak_that_a_person_ends_can_be_resumed(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def launch(
        module: str, attempt_of: Callable[[int], object], *, restarts: Restarts, **how: object
    ) -> int:
        attempt_of(0)
        assert restarts.made_progress is not None
        restarts.made_progress()
        attempt_of(1)
        return 130

    monkeypatch.setattr(run, "launch_attempts", launch)
    folder = tmp_path / "soak"
    assert lab(["soak", "--model", str(model), "--minutes", "0.2", "--out", str(folder)]) == 130
    assert "soak: interrupted; resume it with --resume" in capsys.readouterr().err
    assert not (folder / "report.json").exists()


def samples_of(rank: int, num: int) -> list[MemorySampled]:
    return [
        MemorySampled(at_s=2.0 * n, attempt=0, rank=rank, rss_bytes=2**20, num_shown=16)
        for n in range(num)
    ]


def test_memory_is_called_flat_only_where_it_was_watched() -> None:
    lasting = samples_of(LAUNCHER, 20)
    seen, brief = (
        growths(lasting + samples_of(0, 8) + samples_of(2, 8)),
        growths(lasting + samples_of(0, 7)),
    )
    assert watched(seen) == "launcher, rank 0, rank 2"
    assert watched(brief) == "launcher, no rank lived long enough to tell"


def test_a_long_soak_that_watched_no_rank_is_a_complaint() -> None:
    long_s, lasting = LONG_S + 1.0, samples_of(LAUNCHER, 20)
    unseen = ["no rank was seen for long enough to tell whether it grows"]
    assert complaints(growths(lasting), stream_s=long_s) == unseen
    assert complaints(growths(lasting), stream_s=LONG_S) == []
    assert complaints(growths(lasting + samples_of(1, 8)), stream_s=long_s) == []


def test_a_fault_must_happen_unless_it_waits_for_a_restart_that_may_not_come() -> None:
    fault = PlannedFault(
        number=0,
        kind=FaultKind.RAISE,
        rank=1,
        chunk=9,
        injected=at(rank=1, chunk=9, point=FaultPoint.RECOMPUTE, action="raise"),
    )
    assert untried([fault], [], last_recompute=8) == []
    assert untried([], [], last_recompute=8)[0].startswith("no fault was planned")
    assert untried([fault], [], last_recompute=9) == [
        "fault 0 (exception of rank 1) did not happen"
    ]


def launcher_samples(sizes: list[float]) -> list[MemorySampled]:
    return [
        MemorySampled(at_s=5.0 * n, attempt=0, rank=LAUNCHER, rss_bytes=int(size), num_shown=0)
        for n, size in enumerate(sizes)
    ]


def test_a_process_that_grows_is_distinguished_from_one_that_varies() -> None:
    noise = [300e6 + 30e6 * (n % 7 == 0) for n in range(100)]
    leak = [300e6 + 1.5 * MOST_GROWTH_BYTES / 100 * n for n in range(100)]
    assert [growth.is_flat for growth in growths(launcher_samples(noise))] == [True]
    assert [growth.is_flat for growth in growths(launcher_samples(leak))] == [False]
