"""A disk that gives no answer is a named error within its bound, and what it held stays whole."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

from scope_contracts.errors import RecordingError
from scope_rt.disk import DaemonExecutor, StallError, answer
from scope_rt.video import writer as video_writer
from scope_rt.video.encoder import SegmentEncoder
from scope_rt.video.segments import SegmentJournal
from scope_runners import journal as journal_module
from scope_runners.journal import Journal, read
from tests.runners.test_journal import REQUEST, record
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

    def answer(self, future: Future[T], *, timeout_s: float) -> T:
        """The bound of a call begins once it waits here: a slow machine is no stalled disk."""
        for _ in range(2000):
            if future.done() or self._keeps_waiting.wait(0.01):
                break
        try:
            return answer(future, timeout_s=timeout_s)
        except StallError:
            self._keeps_waiting.clear()
            raise


class File(FileIO):
    """A file on such a disk, open at its end."""

    def __init__(self, path: Path, disk: Disk) -> None:
        super().__init__(path, "r+b")
        self.seek(0, os.SEEK_END)
        self._disk = disk

    def write(self, data: Any) -> int:
        self._disk.wait()
        return super().write(data)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk()
    monkeypatch.setattr(journal_module, "STALL_TIMEOUT_S", BOUND_S)
    for module in (journal_module, video_writer):
        monkeypatch.setattr(module, "answer", disk.answer)
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


def test_a_journal_that_stalls_is_named_and_keeps_its_whole_lines(
    tmp_path: Path, disk: Disk
) -> None:
    journal = Journal(tmp_path / "journal", REQUEST, (), 0)
    journal._file.close()
    journal._file = File(journal.path, disk)
    journal.add(record(0), None)
    disk.stalls.set()
    with pytest.raises(
        RecordingError, match=r"/journal \(no answer from the disk for 0.2 s\); bring"
    ):
        journal.add(record(1), None)
    assert not disk.back.is_set()
    assert [told.chunk_index for told, _ in read(tmp_path / "journal").entries] == [0]
    disk.back.set()
    journal._disk.settle(timeout_s=20)
    journal.close()


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
        assert resumed.held_chunks == 1
    disk.back.set()
    assert num_frames_in(path) == CHUNK


@pytest.mark.parametrize("num_chunks", [0, 1])
def test_a_video_is_let_go_of_by_a_disk_that_stalls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk, num_chunks: int
) -> None:
    path = tmp_path / "video.mp4"
    release = SegmentJournal.release

    def release_later(journal: SegmentJournal) -> None:
        disk.wait()
        release(journal)

    monkeypatch.setattr(SegmentJournal, "release", release_later)
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
        assert resumed.held_chunks == num_chunks
        resumed.write(noise())
    assert num_frames_in(path) == (num_chunks + 1) * CHUNK
