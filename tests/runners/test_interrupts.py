"""Whoever interrupts a stream is told in one sentence what is left, and can resume it."""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from scope_rt.faults import FaultPoint
from scope_rt.mesh.rank import Rank
from scope_rt.record.reader import read_history
from scope_rt.video.segments import VideoSegments
from scope_rt.video.writer import VideoWriter
from scope_runners import rank_group, show
from scope_runners.break_it import stream
from scope_runners.break_it.faults import Fault
from scope_runners.break_it.instruments import FAULTS
from scope_runners.launcher import launch_attempts
from scope_runners.main import main
from tests import warm_python
from tests.runners.streams import (
    SHORT,
    after_two_chunks,
    as_rank_0_of_torchrun,
    lose_the_link_after,
    num_frames,
    set_faults,
    signal_after_two_chunks,
)


def interrupt(*arguments: object, **options: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_before_anything_is_whole_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VideoWriter, "write", interrupt)
    assert main([*SHORT, "--out", str(tmp_path / "a.mp4")]) == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_leaves_a_stream_that_can_be_resumed(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    signum: signal.Signals,
) -> None:
    out = tmp_path / "a.mp4"
    with monkeypatch.context() as patch:
        signal_after_two_chunks(patch, signum, times=2)
        assert main([*SHORT, "--out", str(out)]) == 128 + signum
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "scope-rt: interrupted",
        f"scope-rt: {out} is unfinished; add --resume to resume it",
    ]
    assert main([*SHORT, "--out", str(out), "--resume"]) == 0
    first_line = capsys.readouterr().err.splitlines()[0]
    assert first_line == "scope-rt: resuming at chunk 2, after 2 chunks in the video"
    assert num_frames(out) == 48


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize(
    ("signum", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")]
)
def test_who_stops_a_stream_is_told_at_once_what_it_still_waits_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], signum: signal.Signals, name: str
) -> None:
    said = list[str]()

    def stop() -> None:
        signal.raise_signal(signum)
        said.append(capfd.readouterr().err)

    with pytest.MonkeyPatch.context() as patch:
        after_two_chunks(patch, stop)
        assert main([*SHORT, "--out", str(tmp_path / "a.mp4")]) == 128 + signum
    assert said == [
        f"scope-rt: {name}: the video ends after the chunk that is being made; a second {name} "
        "does not wait for it\n"
    ]


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize(
    ("signum", "is_launched"), [(signal.SIGTERM, False), (signal.SIGHUP, True)]
)
def test_a_signal_that_is_no_ctrl_c_leaves_the_video_so_far_and_a_stream_that_can_be_resumed(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    signum: signal.Signals,
    *,
    is_launched: bool,
) -> None:
    out = tmp_path / "a.mp4"
    with monkeypatch.context() as patch:
        if is_launched:
            as_rank_0_of_torchrun(patch, max_restarts=3)
            patch.setenv("TORCHELASTIC_RUN_ID", "a")
        signal_after_two_chunks(patch, signum)
        assert main([*SHORT, "--out", str(out)]) == 128 + signum
    assert num_frames(out) == 24
    said = capsys.readouterr().err
    assert said.endswith(
        f"scope-rt: interrupted; the first 1.50 s are in {out}; add --resume to resume it\n"
    )
    assert main([*SHORT, "--out", str(out), "--resume"]) == 0
    assert num_frames(out) == 48


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize("is_joined", [False, True])
def test_an_interrupted_end_says_to_resume_where_that_can_be_done(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_joined: bool,
) -> None:
    out = tmp_path / "a.mp4"
    with monkeypatch.context() as patch:
        signal_after_two_chunks(patch)
        owner: Any = show if is_joined else VideoSegments
        patch.setattr(owner, "write_storyboard" if is_joined else "publish", interrupt)
        assert main([*SHORT, "--out", str(out)]) == 130
    hint = f"scope-rt: {out} is unfinished; add --resume to resume it"
    said = capsys.readouterr().err.splitlines()
    assert said == ["scope-rt: interrupted", *([] if is_joined else [hint])]
    assert main([*SHORT, "--out", str(out), "--resume"]) == (2 if is_joined else 0)
    assert num_frames(out) == (24 if is_joined else 48)


@pytest.mark.usefixtures("heeded")
def test_ranks_that_take_too_long_to_end_leave_a_stream_that_can_be_resumed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, log = tmp_path / "a.mp4", tmp_path / ".a.mp4.log"

    def stop_in_chunk_2() -> None:
        bound_s = time.monotonic() + 60
        while time.monotonic() < bound_s:
            if len(read_history(log).durable) == 2:
                os.kill(os.getpid(), signal.SIGINT)
                return
            time.sleep(0.02)

    slow = Fault(
        action="delay",
        rank=0,
        point=FaultPoint.CALL,
        chunk=2,
        times=1,
        arguments={"seconds": 600.0},
    )
    set_faults(monkeypatch, slow)
    monkeypatch.setattr(rank_group, "ORDERLY_END_S", 1.0)
    monkeypatch.setattr(
        "scope_runners.stream.launch_attempts",
        lambda *given, **named: launch_attempts(*given, **(named | {"chunk_timeout_s": 0.0})),
    )
    person = threading.Thread(target=stop_in_chunk_2)
    person.start()
    tp = ["--plan", "tp_v1_1", "--tp", "2", "--oversubscribe"]
    assert stream.main([*SHORT[1:], *tp, "--out", str(out)]) > 128
    person.join()
    said = capfd.readouterr().err.splitlines()
    assert said[-1] == f"scope-rt: {out} is unfinished; add --resume to resume it"
    monkeypatch.delenv(FAULTS)  # else `main` warns that it does not heed it
    assert main([*SHORT, "--out", str(out), "--resume"]) == 0
    first, second, *_ = capfd.readouterr().err.splitlines()
    assert first == "scope-rt: resuming at chunk 2, after 2 chunks in the video"
    assert second.startswith("scope-rt: the stream was made by plan tp_v1_1 --tp 2; plan single --")
    assert num_frames(out) == 48


@pytest.mark.usefixtures("heeded")
def test_after_a_stop_nobody_leaves_the_end_to_a_restart_that_never_comes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a.mp4"
    as_rank_0_of_torchrun(monkeypatch, max_restarts=3)
    lose_the_link_after(2, out, stopped=True)
    assert num_frames(out) == 24
    assert f"the first 1.50 s are in {out}; add --resume to resume it" in capsys.readouterr().err


@pytest.mark.usefixtures("heeded")
def test_a_signal_while_a_library_loads_is_one_sentence_whatever_it_swallows() -> None:
    script = """
import signal, sys
from scope_runners import main, stream
def prepare(*arguments):
    try:
        signal.raise_signal(signal.SIGINT)
    except BaseException:
        pass
    return None
stream.prepare = prepare
sys.exit(main.main(["stream", "--prompt", "a red circle"]))
"""
    command = [sys.executable, "-c", script]
    done = warm_python.run(command, timeout=100)
    assert (done.returncode, done.stderr) == (130, "scope-rt: interrupted\n")


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_model_loads_is_answered_and_leaves_nothing(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    signum: signal.Signals,
) -> None:
    monkeypatch.setattr(Rank, "start", lambda *_: signal.raise_signal(signum))
    assert main([*SHORT, "--out", str(tmp_path / "a.mp4")]) == 128 + signum
    assert capsys.readouterr().err == "scope-rt: interrupted\n"
    assert list(tmp_path.iterdir()) == []
