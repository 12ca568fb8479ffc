"""What a stream leaves behind is resumed, or finished, and never lost by another command."""

import json
import shutil
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from scope_contracts.log_records import Begun
from scope_lab.sample_log import opened
from scope_rt.record import reader
from scope_rt.record.reader import read_history
from scope_rt.record.stream_log import StreamLog
from scope_rt.video.writer import VideoWriter
from scope_runners.chunk_record import STAGES
from scope_runners.job import OutputFiles
from scope_runners.main import main
from tests.runners.streams import (
    PP1,
    SHORT,
    as_rank_0_of_torchrun,
    contents,
    lose_the_link_after,
    num_frames,
)


def start_anew(folder: Path) -> None:
    """What the refusals tell a person to delete."""
    shutil.rmtree(folder / ".a.mp4.snapshot", ignore_errors=True)
    (folder / ".a.mp4.log").unlink()


def test_a_lost_link_is_one_sentence_and_the_stream_can_be_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.mp4"
    lose_the_link_after(1, out)
    assert num_frames(out) == 12
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("scope-rt: receive from rank 1")
    assert lines[-2].endswith(f"the first 0.75 s are in {out}; add --resume to resume it")

    assert main([*SHORT, "--out", str(out), "--resume", "--prompt-at", "1s:a red square"]) == 2
    assert (
        "--prompt-at is 'a red square' at chunk 2, and the stream to resume was begun with none"
        in capsys.readouterr().err
    )
    assert main([*SHORT, "--out", str(out), "--resume"]) == 0
    first_line = capsys.readouterr().err.splitlines()[0]
    assert first_line == "scope-rt: resuming at chunk 1, after 1 chunk in the video"
    summary = json.loads((tmp_path / "a.json").read_text())
    assert summary["totals"]["restarts"] == 1
    assert [chunk["chunk_index"] for chunk in summary["chunks"]] == [0, 1, 2, 3]
    assert num_frames(out) == 48
    assert {path.name for path in tmp_path.iterdir()} == {"a.mp4", "a.png", "a.json"}


def test_what_to_delete_is_named_as_the_output_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    out = Path("a.mp4")
    lose_the_link_after(1, out)
    assert main([*SHORT, "--out", str(out)]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith("to start anew, delete .a.mp4.snapshot and .a.mp4.log")


def test_the_log_of_a_resumed_stream_is_read_no_more_often_than_it_must(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the model is loaded, to refuse early; when the session takes the stream up; for the
    video's writer, and for the summary, neither of which keeps what it read."""
    out, read, open_log = tmp_path / "a.mp4", list[Path](), reader.open_log
    lose_the_link_after(1, out)

    def counted(path: Path) -> BinaryIO:
        read.append(path)
        return open_log(path)

    monkeypatch.setattr(reader, "open_log", counted)
    assert main([*SHORT, "--out", str(out), "--resume"]) == 0
    assert read == [OutputFiles(out, None).hidden_log] * 4


def test_forgetting_to_resume_loses_no_stream(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.mp4"
    lose_the_link_after(1, out)
    held = contents(tmp_path)
    assert main([*SHORT, "--out", str(out)]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"{out} is an unfinished stream of 1 chunk; add --resume to resume it" in said
    assert contents(tmp_path) == held
    start_anew(tmp_path)
    assert main([*SHORT, "--out", str(out)]) == 0


def test_resuming_what_is_finished_loses_no_video(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.mp4"
    assert main([*SHORT, "--out", str(out), "--resume"]) == 0
    assert "has no stream to resume; starting anew" in capsys.readouterr().err
    finished = out.read_bytes()
    assert main([*SHORT, "--out", str(out), "--resume"]) == 2
    assert (
        f"--resume: {out} is finished, as after one Ctrl-C too; choose another"
        in capsys.readouterr().err
    )
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


def test_torchrun_loses_no_stream_either(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a.mp4"
    lose_the_link_after(1, out)
    held = contents(tmp_path)
    as_rank_0_of_torchrun(monkeypatch)
    assert main([*SHORT, "--out", str(out), "--prompt", "a blue square"]) == 2
    assert f"{out} is an unfinished stream of 1 chunk; add" in capsys.readouterr().err
    assert contents(tmp_path) == held


def test_a_stream_without_its_snapshot_is_replaced_by_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.mp4"
    lose_the_link_after(1, out)
    shutil.rmtree(tmp_path / ".a.mp4.snapshot")
    held = contents(tmp_path)
    for more in ([], ["--resume"]):
        assert main([*SHORT, "--out", str(out), *more]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert "1 chunk without the snapshot to resume it from; to start anew, delete" in said
    assert contents(tmp_path) == held
    start_anew(tmp_path)
    assert main([*SHORT, "--out", str(out)]) == 0


@pytest.mark.parametrize("lost", ["log", "0.partial.nut"])
def test_a_stream_of_which_a_file_is_gone_keeps_the_others_and_names_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    out, write = tmp_path / "a.mp4", VideoWriter.write

    def write_and_wait(writer: VideoWriter, frames: Any, **options: Any) -> None:
        write(writer, frames, **options)
        writer.drain()

    monkeypatch.setattr(VideoWriter, "write", write_and_wait)
    lose_the_link_after(2, out)
    (tmp_path / f".a.mp4.{lost}").unlink()
    held = contents(tmp_path)
    assert main([*SHORT, "--out", str(out), "--resume"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "the video to resume is damaged (" in said or "of the stream to resume is gone" in said
    assert f"to start anew, delete {tmp_path / '.a.mp4.snapshot'}" in said
    left = contents(tmp_path)
    log = tmp_path / ".a.mp4.log"
    assert left.pop(log, b"").startswith(held.pop(log, b"")), "a log only grows"
    assert left == held
    (tmp_path / ".a.mp4.log").touch()
    start_anew(tmp_path)
    assert main([*SHORT, "--out", str(out)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"a.mp4", "a.png", "a.json"}


def test_a_recording_is_kept_replaced_by_nobody_and_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, scope = tmp_path / "a.mp4", tmp_path / "a.scope"
    record = ["--out", str(out), "--record", str(scope)]
    lose_the_link_after(2, out, "--record", str(scope))
    assert not (tmp_path / ".a.mp4.log").exists()
    lost = scope.read_bytes()
    assert main([*SHORT, "--out", str(tmp_path / "b.mp4"), "--record", str(scope)]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"--record {scope} is there already; choose another file, or delete it" in said
    assert scope.read_bytes() == lost
    assert main([*SHORT, *record, "--resume"]) == 0
    history = read_history(scope)
    assert scope.read_bytes().startswith(lost)
    assert sorted(history.finished) == sorted(history.durable) == [0, 1, 2, 3]
    assert all(finished.latents is not None for finished in history.finished.values())
    assert (history.is_published, history.num_starts) == (True, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"a.mp4", "a.png", "a.json", "a.scope"}
    assert main([*SHORT, *record]) == 2
    assert main([*SHORT, *record, "--resume"]) == 2
    assert f"--resume: {out} is finished" in capsys.readouterr().err


def test_a_recording_that_would_never_be_written_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, scope = tmp_path / "a.mp4", tmp_path / "a.scope"
    lose_the_link_after(2, out)
    held = contents(tmp_path)
    assert main([*SHORT, "--out", str(out), "--record", str(scope), "--resume"]) == 2
    assert f"the stream to resume keeps its log in {tmp_path}/.a.mp4.log" in capsys.readouterr().err
    assert contents(tmp_path) == held
    assert main([*SHORT, "--out", str(out), "--resume"]) == 0


def test_a_stream_killed_before_its_first_resume_point_is_begun_anew_by_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its log may lack events of the schedule, which is no reason to refuse them."""
    out, cut = tmp_path / "a.mp4", ["--hard-cut-at", "2s"]
    log = StreamLog(tmp_path / ".a.mp4.log")
    log.append(opened())
    log.append(Begun(at_s=0.0, prompt="a red circle"))
    log.close()
    assert main([*SHORT, *cut, "--out", str(out), "--resume"]) == 0
    assert "has no stream to resume; starting anew" in capsys.readouterr().err


def test_after_a_resume_every_chunk_counts_in_every_stage(tmp_path: Path) -> None:
    out = tmp_path / "a.mp4"
    lose_the_link_after(2, out)
    assert main([*SHORT, "--out", str(out), "--resume"]) == 0
    summary = json.loads((tmp_path / "a.json").read_text())
    assert [sorted(chunk["stage_ms"]) for chunk in summary["chunks"]] == [sorted(STAGES)] * 4


def test_a_flipped_bit_in_what_was_left_is_named_and_not_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, segment = tmp_path / "a.mp4", tmp_path / ".a.mp4.0.partial.nut"
    lose_the_link_after(2, out)
    published, data = out.read_bytes(), bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    assert main([*SHORT, "--out", str(out), "--resume"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "the video to resume is damaged (" in said
    assert "are others than were written); to start anew, delete" in said
    assert out.read_bytes() == published


@pytest.mark.parametrize("kind", ["journal", "checkpoint"])
def test_an_unfinished_stream_of_an_earlier_version_is_not_replaced(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    left = tmp_path / f".a.mp4.{kind}"
    left.write_bytes(b"of another version")
    out = ["--out", str(tmp_path / "a.mp4"), "--seconds", "1"]
    assert main(["stream", "--prompt", "a red circle", *out]) == 2
    assert f"delete {left}" in capsys.readouterr().err
    assert left.exists()


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (["--seed", "8"], "with seed 7, this one has 8; use"),
        (["--height", "128"], ", this one has 128; use"),
    ],
)
def test_a_resume_with_other_settings_is_refused_before_a_rank_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], changed: list[str], told: str
) -> None:
    out = tmp_path / "a.mp4"
    lose_the_link_after(2, out)
    before = contents(tmp_path)
    capfd.readouterr()
    assert main([*SHORT, *PP1, "--out", str(out), *changed, "--resume"]) == 2
    (said,) = capfd.readouterr().err.splitlines()
    assert told in said
    assert contents(tmp_path) == before
