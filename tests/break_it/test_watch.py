"""A run ends within its bound, stopped processes too, and what outlives it is told and ended."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from scope_runners.break_it.watch import OverrunError, Watch


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_a_stopped_process_is_ended_when_the_bound_is_over(
    sleeper: "subprocess.Popen[bytes]",
) -> None:
    os.kill(sleeper.pid, signal.SIGSTOP)
    with Watch(bound_s=0.3) as watch:
        watch.add(sleeper.pid)
        assert sleeper.wait(10) == -signal.SIGKILL
        assert watch.has_overrun
        with pytest.raises(OverrunError):
            watch.check()
        assert watch.finish([]) == ()


def test_every_start_has_the_whole_bound(
    sleeper: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: now_s, sleep=time.sleep)
    monkeypatch.setattr("scope_runners.break_it.watch.time", clock)
    with Watch(bound_s=0.5) as watch:
        for _ in range(4):
            now_s += 0.4
            watch.add(sleeper.pid)
        with pytest.raises(subprocess.TimeoutExpired):  # it looks again after 0.5 s of its own
            sleeper.wait(1.0)
        assert not watch.has_overrun


def test_a_process_that_outlives_its_run_is_told_and_ended(
    sleeper: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    with Watch(bound_s=60.0) as watch, monkeypatch.context() as patch:
        patch.setattr("scope_runners.break_it.watch.GONE_WITHIN_S", 0.2)
        assert watch.finish([sleeper.pid]) == (sleeper.pid,)
    assert sleeper.wait(10) == -signal.SIGKILL


def test_a_persons_signal_ends_the_run_at_once_whoever_handles_it(
    sleeper: "subprocess.Popen[bytes]",
) -> None:
    handler = signal.signal(signal.SIGTERM, lambda signum, frame: None)
    try:
        with Watch(bound_s=60.0) as watch:
            watch.add(sleeper.pid)
            os.kill(os.getpid(), signal.SIGTERM)
            assert sleeper.wait(10) == -signal.SIGKILL
            assert watch.is_stopped
            with pytest.raises(OverrunError):
                watch.check()
    finally:
        signal.signal(signal.SIGTERM, handler)
