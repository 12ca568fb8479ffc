"""A disk that gives no answer is a named error within its bound, and what it held stays whole."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

from scope_contracts.errors import RecordingError
from scope_rt.disk import DaemonExecutor, StallError, answer
from scope_rt.video import segments
from scope_rt.video import writer as video_writer
from scope_rt.video.encoder import SegmentEncoder
from scope_rt.video.segment_file import SegmentFile
from scope_rt.video.segments import VideoSegments
from tests.video.test_full_disk import (
    CHUNK,
    noise,
    num_frames_in,
    record_until_refused,
    writer_for,
)

BOUND_S = 0.2
T = TypeVar("T")


class Disk:
    """Answers until `stalls` is set, and again once `back` is."""

    def __init__(self) -> None:
        self.stalls, self.back = threading.Event(), threading.Event()
        self._keeps_waiting = threading.Event()

    def wait(self) -> None:
        if self.stalls.is_set():
            self._keeps_waiting.set()
            assert self.back.wait(timeout=20), "nobody gave up"

    def answer(
        self, future: Future[T], *, timeout_s: float, worker: DaemonExecutor | None = None
    ) -> T:
        """The bound of a call begins once it waits here: a slow machine is no stalled disk."""
        for _ in range(2000):
            if future.done() or self._keeps_waiting.wait(0.01):
                break
        try:
            return answer(future, timeout_s=timeout_s, worker=worker)
        except StallError:
            self._keeps_waiting.clear()
            raise


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk()
    monkeypatch.setattr(video_writer, "answer", disk.answer)
    yield disk
    disk.back.set()


def test_a_call_that_nobody_waits_for_any_more_never_begins(disk: Disk) -> None:
    calls, begun = DaemonExecutor("disk"), list[str]()
    disk.stalls.set()
    stalled = calls.submit(disk.wait)
    behind = calls.submit(begun.append, "late")
    with pytest.raises(StallError):
        answer(behind, timeout_s=BOUND_S)
    disk.back.set()
    stalled.result(timeout=20)
    calls.submit(begun.append, "next").result(timeout=20)
    assert begun == ["next"]


def test_a_disk_that_does_not_answer_ends_the_recording_and_not_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk
) -> None:
    path = tmp_path / "video.mp4"
    encode = SegmentEncoder.encode

    def hangs_later(encoder: SegmentEncoder, frame_HWC: NDArray[np.uint8]) -> None:
        if encoder._next_pts >= CHUNK:
            disk.wait()
        encode(encoder, frame_HWC)

    monkeypatch.setattr(SegmentEncoder, "encode", hangs_later)
    writer = writer_for(path, stall_timeout_s=BOUND_S)
    disk.stalls.set()
    with pytest.raises(RecordingError, match=r"disk for 0.2 s\).* kept.*; bring the disk back"):
        record_until_refused(writer)
    assert not disk.back.is_set()
    with writer_for(path, resume=True) as resumed:
        assert resumed.earlier_chunks == 1
    disk.back.set()
    assert num_frames_in(path) == CHUNK


@pytest.mark.parametrize("num_chunks", [0, 1])
def test_a_video_is_let_go_of_by_a_disk_that_stalls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk, num_chunks: int
) -> None:
    path = tmp_path / "video.mp4"
    release = VideoSegments.release

    def release_later(segments: VideoSegments) -> None:
        disk.wait()
        release(segments)

    monkeypatch.setattr(VideoSegments, "release", release_later)
    writer = writer_for(path, stall_timeout_s=BOUND_S)
    for _ in range(num_chunks):
        writer.write(noise())
        writer.drain()
    disk.stalls.set()
    writer.suspend()
    assert not disk.back.is_set()
    disk.back.set()
    writer._thread.settle(timeout_s=20)
    with writer_for(path, resume=True) as resumed:
        assert resumed.earlier_chunks == num_chunks
        resumed.write(noise())
    assert num_frames_in(path) == (num_chunks + 1) * CHUNK


def test_a_video_that_is_finished_on_a_disk_that_stalls_stays_for_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk
) -> None:
    path = tmp_path / "video.mp4"
    packets = SegmentFile.packets

    def read_later(part: SegmentFile) -> Iterator[Any]:
        disk.wait()
        return packets(part)

    monkeypatch.setattr(SegmentFile, "packets", read_later)
    writer = writer_for(path, stall_timeout_s=BOUND_S)
    writer.write(noise())
    writer.drain()
    disk.stalls.set()
    with pytest.raises(RecordingError, match=r"disk for 0.2 s\), its first 1 chunks are kept"):
        writer.close()
    assert not disk.back.is_set()
    disk.back.set()
    writer._thread.settle(timeout_s=20)
    assert not path.exists(), "it was published though nobody waited for it any more"
    with writer_for(path, resume=True) as resumed:
        assert resumed.earlier_chunks == 1
    assert num_frames_in(path) == CHUNK


def test_a_call_of_many_answers_may_take_longer_than_one() -> None:
    disk, bound_s = DaemonExecutor("disk"), 0.05

    def copy() -> str:
        end_s = time.thread_time() + 4 * bound_s
        while time.thread_time() < end_s:
            pass
        return "copied"

    assert answer(disk.submit(copy), timeout_s=bound_s, worker=disk) == "copied"
    with pytest.raises(StallError):
        answer(disk.submit(time.sleep, 20), timeout_s=bound_s, worker=disk)


@pytest.mark.parametrize("goes_on", ["before the join", "before the name is replaced"])
def test_a_video_that_was_given_up_leaves_the_next_writer_s_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk, goes_on: str
) -> None:
    """The disk answers the first writer once the second has joined its video."""
    path, join, replace = tmp_path / "video.mp4", segments._join, Path.replace
    publish = VideoSegments.publish

    def publish_later(given_up: VideoSegments) -> Any:
        if goes_on == "before the join":
            disk.wait()
        return publish(given_up)

    def replace_later(partial: Path, target: Path) -> Path:
        if target == path and goes_on == "before the name is replaced":
            disk.wait()
        return replace(partial, target)

    def join_first(*args: Any, **kwargs: Any) -> None:
        join(*args, **kwargs)
        if first._publishing is not None and not first._open:
            disk.back.set()
            wait([first._publishing], timeout=20)
            assert not path.exists(), "the first writer published a file"

    monkeypatch.setattr(VideoSegments, "publish", publish_later)
    monkeypatch.setattr(Path, "replace", replace_later)
    monkeypatch.setattr(segments, "_join", join_first)
    first = writer_for(path, stall_timeout_s=BOUND_S)
    first.write(noise())
    first.drain()
    disk.stalls.set()
    with pytest.raises(RecordingError, match="its first 1 chunks are kept"):
        first.close()
    disk.stalls.clear()
    with writer_for(path, resume=True) as second:
        second.write(noise())
    assert num_frames_in(path) == 2 * CHUNK
    assert list(tmp_path.glob(".*.partial.*")) == []
