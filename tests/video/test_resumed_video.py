"""A recording that was left unfinished is resumed, replaced or refused, and becomes one video."""

import threading
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from scope_contracts.errors import RecordingError, UserInputError
from scope_lab.sample_log import opened
from scope_rt.record.reader import read_history, read_progress, video_records
from scope_rt.record.stream_log import StreamLog
from scope_rt.video.encoder import SegmentEncoder
from scope_rt.video.picture_format import check_recordable
from scope_rt.video.writer import VideoWriter
from tests.video.grey_video import (
    FPS,
    SIDE,
    STARTS,
    SUFFIXES,
    LoggedWriter,
    finish,
    frame_numbers,
    greys,
    log_of,
    suspended,
    write_chunks,
    writer_for,
)


def test_many_lives_make_one_video(tmp_path: Path) -> None:
    path = tmp_path / "video.mp4"
    for num_chunks in (2, 2, 3, 6):
        suspended(path, num_chunks)
        assert not path.exists()
    assert finish(path) == list(range(STARTS[-1]))


@SUFFIXES
def test_a_chunk_is_durable_without_the_next_one(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"video{suffix}"
    writer = writer_for(path)
    for index in range(3):
        writer.write(greys(index))
        writer.drain()
        assert writer.durable_chunks == index + 1
    copy = tmp_path / "copy"
    copy.mkdir()
    for hidden in tmp_path.glob(f".video{suffix}.*"):
        (copy / hidden.name).write_bytes(hidden.read_bytes())
    earlier = video_records(log_of(path), read_progress(log_of(path)))
    writer.abort()
    copied = copy / path.name
    with VideoWriter(copied, width=SIDE, height=SIDE, fps=FPS, earlier=earlier) as resumed:
        assert resumed.earlier_chunks == 3
    assert frame_numbers(copy / path.name) == list(range(STARTS[3]))


def test_a_new_recording_removes_what_a_dead_writer_left(tmp_path: Path) -> None:
    path = tmp_path / "video.mp4"
    suspended(path, 3)
    suspended(path, 5)
    (tmp_path / ".video.mp4.partial.mp4").write_bytes(b"half a join")
    suspended(tmp_path / "other.mp4", 1)
    with writer_for(path, resume=False) as writer:
        assert writer.earlier_chunks == 0
        write_chunks(writer, 1)
    assert frame_numbers(path) == list(range(STARTS[1]))
    assert finish_other(tmp_path) == [0, 1, 2, 3, 4]


def finish_other(folder: Path) -> list[int]:
    writer_for(folder / "other.mp4").close()
    return frame_numbers(folder / "other.mp4")


def test_a_video_that_was_begun_again_is_resumed_without_what_was_before(tmp_path: Path) -> None:
    """As after a retraction of all chunks: they are made again in another segment."""
    path = tmp_path / "video.mp4"
    suspended(path, 3)
    log = StreamLog(log_of(path), resume=True)
    log.append(opened(resumed_at_chunk=0))
    log.close()
    suspended(path, 2)
    with writer_for(path) as writer:
        assert writer.earlier_chunks == 2
        write_chunks(writer, 3)
    assert frame_numbers(path) == list(range(STARTS[3]))
    assert [each.number for each in read_history(log_of(path)).segments] == [0, 1, 2]


def test_the_check_leaves_a_recording_to_be_resumed(tmp_path: Path) -> None:
    path = tmp_path / "video.mp4"
    suspended(path, 3)
    check_recordable(path, width=SIDE, height=SIDE, fps=FPS)
    assert finish(path) == list(range(STARTS[-1]))


def test_abort_of_a_resumed_recording_leaves_nothing(tmp_path: Path) -> None:
    suspended(tmp_path / "video.mp4", 3)
    writer = writer_for(tmp_path / "video.mp4")
    write_chunks(writer, 5)
    writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_a_suspended_recording_of_no_chunk_leaves_nothing(tmp_path: Path) -> None:
    suspended(tmp_path / "video.mp4", 0)
    assert list(tmp_path.iterdir()) == []


def test_closing_a_resumed_recording_publishes_it_without_a_new_chunk(tmp_path: Path) -> None:
    path = tmp_path / "video.mp4"
    suspended(path, 3)
    writer_for(path).close()
    assert frame_numbers(path) == list(range(STARTS[3]))


def test_an_exception_keeps_the_chunks_where_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "video.mp4"
    with pytest.raises(KeyboardInterrupt), writer_for(path, keep_on_error=True) as writer:
        write_chunks(writer, 3)
        raise KeyboardInterrupt
    with writer_for(path) as writer:
        assert writer.earlier_chunks == 3


@pytest.mark.parametrize(
    ("size", "fps"), [((SIDE, SIDE), 24), ((SIDE, 2 * SIDE), FPS)], ids=["rate", "size"]
)
def test_another_format_cannot_resume_and_harms_nothing(
    tmp_path: Path, size: tuple[int, int], fps: int
) -> None:
    path = tmp_path / "video.mp4"
    suspended(path, 3)
    with pytest.raises(UserInputError, match="to resume is"):
        LoggedWriter(path, width=size[0], height=size[1], fps=fps)
    assert finish(path) == list(range(STARTS[-1]))


def test_durable_chunks_lags_behind_an_encoder_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    encode = SegmentEncoder.encode

    def gated(encoder: SegmentEncoder, frame_HWC: NDArray[np.uint8]) -> None:
        assert gate.wait(timeout=30)
        encode(encoder, frame_HWC)

    monkeypatch.setattr(SegmentEncoder, "encode", gated)
    writer = writer_for(tmp_path / "video.mp4")
    write_chunks(writer, 2)
    assert writer.durable_chunks == 0
    gate.set()
    writer.close()
    assert writer.durable_chunks == 2


def test_recording_errors_are_not_hidden_by_a_second_use(tmp_path: Path) -> None:
    writer = writer_for(tmp_path / "video.mp4")
    writer.abort()
    with pytest.raises(RecordingError, match="has ended"):
        writer.write(greys(0))


def test_chunks_that_a_resume_makes_again_are_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "video.mp4"
    suspended(path, 5)
    log = StreamLog(log_of(path), resume=True)
    log.append(opened(resumed_at_chunk=2))
    log.close()
    with writer_for(path) as writer:
        assert writer.earlier_chunks == 2
    assert frame_numbers(path) == list(range(STARTS[2]))
