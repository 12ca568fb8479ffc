"""What a stream leaves behind is resumed, or finished, and never lost by another command."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from scope_rt.faults import FaultPoint
from scope_rt.video.encoder import SegmentEncoder
from scope_rt.video.segments import SegmentJournal
from scope_rt.video.writer import VideoWriter
from scope_runners import rank_group, show
from scope_runners.break_it import stream
from scope_runners.break_it.faults import Fault
from scope_runners.journal import Journal
from scope_runners.main import main
from scope_runners.storyboard import Storyboard
from tests.runners.streams import (
    SHORT,
    lose_the_link_after,
    num_frames,
    set_faults,
    signal_after_two_chunks,
)


def files_in(folder: Path) -> dict[Path, bytes]:
    """What is there, also in folders."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_lost_link_is_one_sentence_and_the_stream_can_be_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.mp4"
    lose_the_link_after(1, out)
    assert num_frames(out) == 12
    lines = capsys.readouterr().err.splitlines()
    assert lines[-2].startswith("scope-rt: receive from rank 1")
    assert lines[-3].endswith(f"the first 0.75 s are in {out}; add --resume to go on")

    assert main([*SHORT, "--out", str(out), "--resume", "--prompt-at", "1s:a red square"]) == 2
    assert "--prompt-at is ['1s:a red square']" in capsys.readouterr().err
    assert main([*SHORT, "--out", str(out), "--resume"]) == 0
    assert capsys.readouterr().err.splitlines()[0] == "scope-rt: going on at chunk 1; 1 are kept"
    summary = json.loads((tmp_path / "a.json").read_text())
    assert summary["totals"]["restarts"] == 1
    assert [chunk["chunk_index"] for chunk in summary["chunks"]] == [0, 1, 2, 3]
    assert num_frames(out) == 48
    assert {path.name for path in tmp_path.iterdir()} == {"a.mp4", "a.png", "a.json"}


def test_forgetting_to_resume_loses_no_stream(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.mp4"
    lose_the_link_after(1, out)
    held = files_in(tmp_path)
    assert main([*SHORT, "--out", str(out)]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"{out} is an unfinished stream of 1 chunk; add --resume to go on with it" in said
    assert files_in(tmp_path) == held
    (tmp_path / ".a.mp4.journal").unlink()
    assert main([*SHORT, "--out", str(out)]) == 0


def test_resuming_what_is_finished_loses_no_video(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.mp4"
    assert main([*SHORT, "--out", str(out), "--resume"]) == 0
    assert "has no stream to resume; starting anew" in capsys.readouterr().err
    finished = out.read_bytes()
    assert main([*SHORT, "--out", str(out), "--resume"]) == 2
    assert f"--resume: {out} is finished; choose another --out" in capsys.readouterr().err
    assert out.read_bytes() == finished


def test_a_resumed_stream_may_be_longer_and_has_the_cues_that_were_after_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, cue = tmp_path / "a.mp4", ["--prompt-at", "3.5s:a green square"]
    lose_the_link_after(1, out, *cue)
    assert main([*SHORT, "--out", str(out), *cue, "--seconds", "5", "--resume"]) == 0
    chunks = json.loads((tmp_path / "a.json").read_text())["chunks"]
    assert [c["prompt"] for c in chunks] == ["a red circle"] * 5 + ["a green square"] * 2


def test_a_resumed_stream_may_end_before_what_it_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.mp4"
    lose_the_link_after(2, out)
    assert main([*SHORT, "--out", str(out), "--seconds", "0.75", "--resume"]) == 0
    assert json.loads((tmp_path / "a.json").read_text())["ending"] == "complete"
    assert num_frames(out) == 24
    assert {path.name for path in tmp_path.iterdir()} == {"a.mp4", "a.png", "a.json"}


def looking_for(path: Path, looks: list[bool], method: Any) -> Any:
    def looking(self: Any) -> None:
        looks.append(path.exists())
        method(self)

    return looking


def test_of_what_a_stream_leaves_for_a_restart_the_snapshot_is_removed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, looks = tmp_path / "a.mp4", list[bool]()
    remove = looking_for(tmp_path / ".a.mp4.snapshot" / "state", looks, Journal.remove)
    monkeypatch.setattr(Journal, "remove", remove)
    assert main([*SHORT, "--out", str(out)]) == 0
    assert looks == [False]


def test_an_interrupt_before_anything_is_whole_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(self: object, frames: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(VideoWriter, "write", die)
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
        f"scope-rt: {out} is unfinished; add --resume to go on",
    ]
    assert main([*SHORT, "--out", str(out), "--resume"]) == 0
    assert capsys.readouterr().err.splitlines()[0] == "scope-rt: going on at chunk 2; 2 are kept"
    assert num_frames(out) == 48


def interrupt(*arguments: object) -> None:
    raise KeyboardInterrupt


def no_space(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.usefixtures("heeded")
@pytest.mark.parametrize("is_joined", [False, True])
def test_an_interrupted_end_says_to_go_on_where_that_can_be_done(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_joined: bool,
) -> None:
    out = tmp_path / "a.mp4"
    with monkeypatch.context() as patch:
        signal_after_two_chunks(patch)
        owner: Any = Storyboard if is_joined else SegmentJournal
        patch.setattr(owner, "write" if is_joined else "publish", interrupt)
        assert main([*SHORT, "--out", str(out)]) == 130
    hint = f"scope-rt: {out} is unfinished; add --resume to go on"
    said = capsys.readouterr().err.splitlines()
    assert said == ["scope-rt: interrupted", *([] if is_joined else [hint])]
    assert main([*SHORT, "--out", str(out), "--resume"]) == (2 if is_joined else 0)
    assert num_frames(out) == (24 if is_joined else 48)


def test_a_full_disk_after_the_last_chunk_is_one_sentence_and_the_rest_can_be_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a.mp4"

    with monkeypatch.context() as patch:
        patch.setattr(Storyboard, "write", no_space)
        assert main([*SHORT, "--out", str(out)]) == 1
    said = capsys.readouterr().err.splitlines()[-2]
    assert f"{out} is written, and what belongs beside it is not (No space left" in said
    assert num_frames(out) == 48
    assert main([*SHORT, "--out", str(out), "--resume"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"a.mp4", "a.png", "a.json"}


@pytest.mark.usefixtures("heeded")
def test_ranks_that_take_too_long_to_end_leave_a_stream_that_can_be_resumed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, journal = tmp_path / "a.mp4", tmp_path / ".a.mp4.journal"

    def stop_in_chunk_2() -> None:
        bound_s = time.monotonic() + 60
        while time.monotonic() < bound_s:
            if journal.exists() and journal.read_bytes().count(b'"chunk"') == 2:
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
    person = threading.Thread(target=stop_in_chunk_2)
    person.start()
    tp = ["--plan", "tp_v1_1", "--tp", "2", "--oversubscribe"]
    assert stream.main([*SHORT[1:], *tp, "--out", str(out)]) > 128
    person.join()
    said = capfd.readouterr().err.splitlines()
    assert said[-1] == f"scope-rt: {out} is unfinished; add --resume to go on"
    assert main([*SHORT, "--out", str(out), "--resume"]) == 0
    assert capfd.readouterr().err.splitlines()[0] == "scope-rt: going on at chunk 2; 2 are kept"
    assert num_frames(out) == 48


def as_rank_0_of_torchrun(monkeypatch: pytest.MonkeyPatch, *, max_restarts: int = 0) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", str(max_restarts))


def test_torchrun_loses_no_stream_either(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a.mp4"
    lose_the_link_after(1, out)
    held = files_in(tmp_path)
    as_rank_0_of_torchrun(monkeypatch)
    assert main([*SHORT, "--out", str(out), "--prompt", "a blue square"]) == 2
    assert f"{out} is an unfinished stream of 1 chunk; add" in capsys.readouterr().err
    assert files_in(tmp_path) == held


@pytest.mark.usefixtures("heeded")
def test_after_a_stop_nobody_leaves_the_end_to_a_restart_that_never_comes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a.mp4"
    as_rank_0_of_torchrun(monkeypatch, max_restarts=3)
    lose_the_link_after(2, out, stopped=True)
    assert num_frames(out) == 24
    assert f"the first 1.50 s are in {out}; add --resume to go on" in capsys.readouterr().err


def test_a_stream_without_its_snapshot_is_replaced_by_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.mp4"
    lose_the_link_after(1, out)
    shutil.rmtree(tmp_path / ".a.mp4.snapshot")
    held = files_in(tmp_path)
    for more in ([], ["--resume"]):
        assert main([*SHORT, "--out", str(out), *more]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert "1 chunk without the snapshot to go on from; delete" in said
    assert files_in(tmp_path) == held
    (tmp_path / ".a.mp4.journal").unlink()
    assert main([*SHORT, "--out", str(out)]) == 0


@pytest.mark.parametrize("lost", ["partial.jsonl", "0.partial.nut"])
def test_a_stream_of_which_a_file_is_gone_keeps_the_others_and_names_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    out, write = tmp_path / "a.mp4", VideoWriter.write

    def write_and_wait(writer: VideoWriter, frames: Any) -> None:
        write(writer, frames)
        writer.drain()

    monkeypatch.setattr(VideoWriter, "write", write_and_wait)
    lose_the_link_after(2, out)
    (tmp_path / f".a.mp4.{lost}").unlink()
    held, log = files_in(tmp_path), tmp_path / ".a.mp4.log"
    assert main([*SHORT, "--out", str(out), "--resume"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "the video to resume is damaged (" in said or "after 1 chunk, and 0 are there" in said
    assert f"start anew: delete {tmp_path / '.a.mp4.journal'}, then leave --resume out" in said
    left = files_in(tmp_path)
    assert left.pop(log).startswith(held.pop(log)), "the log tells of the refused start as well"
    assert left == held
    (tmp_path / ".a.mp4.journal").unlink()
    assert main([*SHORT, "--out", str(out)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"a.mp4", "a.png", "a.json"}


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
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (130, "scope-rt: interrupted\n")


@pytest.mark.parametrize("killed_in", ["forget", "remove"])
def test_a_video_whose_process_died_before_its_last_step_is_finished(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    killed_in: str,
) -> None:
    out = tmp_path / "a.mp4"
    with monkeypatch.context() as patch:
        if killed_in == "forget":
            patch.setattr(show._Stage, "forget", show._Stage.leave)
        else:
            patch.setattr(Journal, "remove", Journal.close)
        assert main([*SHORT, "--out", str(out)]) == 0
    finished = out.read_bytes()
    assert main([*SHORT, "--out", str(out), "--resume", "--seconds", "6"]) == 2
    assert f"--resume: {out} is finished" in capsys.readouterr().err
    code = main([*SHORT, "--out", str(out), "--resume"])  # told in full only with its snapshot
    assert code == (0 if killed_in == "forget" else 2)
    assert out.read_bytes() == finished
    assert main([*SHORT, "--out", str(out)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"a.mp4", "a.png", "a.json"}


def test_chunks_that_never_reached_the_disk_are_not_called_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a.mp4"

    out.write_bytes(b"an earlier video")
    with monkeypatch.context() as patch:
        patch.setattr(SegmentEncoder, "encode", no_space)
        assert main([*SHORT, "--out", str(out), "--seconds", "0.75"]) == 1
    assert "no chunk of it is whole; free disk space" in capsys.readouterr().err
    assert main([*SHORT, "--out", str(out), "--seconds", "0.75", "--resume"]) == 0
    assert num_frames(out) == 12
