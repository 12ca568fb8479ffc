"""A stream whose last steps fail or are cut short is finished later, and not called published."""

import errno
import os
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from scope_rt.record.snapshot_folder import SnapshotFolder
from scope_rt.video.encoder import SegmentEncoder
from scope_rt.video.segments import VideoSegments
from scope_runners import show
from scope_runners.exit_codes import DISK_FULL
from scope_runners.job import OutputFiles
from scope_runners.main import main
from scope_runners.stage import Stage
from tests.runners.streams import SHORT, as_rank_0_of_torchrun, lose_the_link_after, num_frames


def no_space(*arguments: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_of_what_a_stream_leaves_for_a_restart_the_snapshot_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, looks, unlink = tmp_path / "a.mp4", list[bool](), Path.unlink

    def looking(path: Path, missing_ok: bool = False) -> None:
        if path.name == ".a.mp4.log":
            looks.append((tmp_path / ".a.mp4.snapshot").exists())
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", looking)
    assert main([*SHORT, "--out", str(out)]) == 0
    assert looks == [False]


def test_a_full_disk_after_the_last_chunk_is_one_sentence_and_the_rest_can_be_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a.mp4"

    with monkeypatch.context() as patch:
        patch.setattr(show, "write_storyboard", no_space)
        assert main([*SHORT, "--out", str(out)]) == DISK_FULL
    said = capsys.readouterr().err
    assert f"{out} is written, and what belongs beside it is not (No space left" in said
    assert num_frames(out) == 48
    assert main([*SHORT, "--out", str(out), "--resume"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"a.mp4", "a.png", "a.json"}


@pytest.mark.parametrize("owner", ["video", "snapshot"])
def test_a_full_disk_is_no_failure_of_a_rank_that_another_start_mends(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    owner: str,
) -> None:
    """Rank0 of a launcher that would start it again says so once, and leaves all as it is."""
    out = tmp_path / "a.mp4"
    name = {"video": "commit_chunk", "snapshot": "write"}[owner]
    kind: Any = {"video": VideoSegments, "snapshot": SnapshotFolder}[owner]
    whole, calls = getattr(kind, name), count()

    def full_after_two(*arguments: Any, **options: Any) -> Any:
        return no_space() if next(calls) >= 2 else whole(*arguments, **options)

    with monkeypatch.context() as patch:
        as_rank_0_of_torchrun(patch, max_restarts=3)
        patch.setattr(kind, name, full_after_two)
        assert main([*SHORT, "--out", str(out)]) == DISK_FULL
    (said,) = capsys.readouterr().err.splitlines()
    assert "No space left on device" in said
    assert "kept; free disk space, then resume (--resume" in said
    assert not out.exists()
    assert main([*SHORT, "--out", str(out), "--resume"]) == 0
    assert num_frames(out) == 48


def test_a_disk_that_is_still_full_is_no_bad_argument_and_the_stream_can_be_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a.mp4"
    lose_the_link_after(1, out)
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(VideoSegments, "claim_segment", no_space)
        assert main([*SHORT, "--out", str(out), "--resume"]) == DISK_FULL
    said = capsys.readouterr().err
    assert "its first 1 chunks are kept; free disk space, then resume" in said
    assert "delete" not in said
    assert main([*SHORT, "--out", str(out), "--resume"]) == 0
    assert num_frames(out) == 48


def test_chunks_that_never_reached_the_disk_are_not_called_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a.mp4"

    out.write_bytes(b"an earlier video")
    with monkeypatch.context() as patch:
        patch.setattr(SegmentEncoder, "encode", no_space)
        assert main([*SHORT, "--out", str(out), "--seconds", "0.75"]) == DISK_FULL
    assert "no chunk of it is whole; free disk space" in capsys.readouterr().err
    assert main([*SHORT, "--out", str(out), "--seconds", "0.75", "--resume"]) == 0
    assert num_frames(out) == 12


@pytest.mark.parametrize("killed_before", ["snapshot", "log"])
def test_a_video_whose_process_died_before_its_last_step_is_finished(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    killed_before: str,
) -> None:
    out = tmp_path / "a.mp4"
    with monkeypatch.context() as patch:
        if killed_before == "log":
            patch.setattr(OutputFiles, "hidden_log", tmp_path / "another", raising=True)
            patch.setattr(OutputFiles, "log", tmp_path / ".a.mp4.log")
        else:
            patch.setattr(Stage, "forget", lambda stage: None)
        assert main([*SHORT, "--out", str(out)]) == 0
    finished = out.read_bytes()
    assert main([*SHORT, "--out", str(out), "--resume", "--seconds", "6"]) == 2
    assert f"--resume: {out} is finished" in capsys.readouterr().err
    code = main([*SHORT, "--out", str(out), "--resume"])  # told in full only with its snapshot
    assert code == (0 if killed_before == "snapshot" else 2)
    assert out.read_bytes() == finished
    assert main([*SHORT, "--out", str(out)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"a.mp4", "a.png", "a.json"}
