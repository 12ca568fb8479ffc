"""A disk that gives no answer is a named error within its bound, and what it held stays whole."""

import os
import threading
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from scope_rt.control import stream_state
from scope_rt.control.stream_state import Checkpoint, CheckpointError
from scope_rt.streaming.segments import SegmentJournal
from scope_rt.streaming.video_writer import RecordingError
from scope_runners import journal as journal_module
from scope_runners.journal import Journal, read
from tests.control.test_controller import SETTINGS, MemoryMesh, controller
from tests.runners.test_journal import REQUEST, record
from tests.streaming.test_full_disk import CHUNK, noise, num_frames_in, writer_for

BOUND_S = 0.2


class Disk:
    """Answers until `stalls` is set, and again once `back` is."""

    def __init__(self) -> None:
        self.stalls, self.back = threading.Event(), threading.Event()

    def wait(self) -> None:
        if self.stalls.is_set():
            assert self.back.wait(timeout=20), "nobody gave up"


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
    for module in (stream_state, journal_module):
        monkeypatch.setattr(module, "STALL_TIMEOUT_S", BOUND_S)
    disk = Disk()
    yield disk
    disk.back.set()


def test_a_checkpoint_that_stalls_is_named_and_never_replaces_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk
) -> None:
    path = tmp_path / "c"
    write_bytes = Path.write_bytes

    def write(path: Path, content: bytes) -> int:
        disk.wait()
        return write_bytes(path, content)

    monkeypatch.setattr(Path, "write_bytes", write)
    checkpoint = Checkpoint(path, {"seed": 1})
    stream = controller(MemoryMesh(), max_in_flight=1, checkpoint=checkpoint).run(8)
    next(stream)
    before = path.read_bytes()
    disk.stalls.set()
    with pytest.raises(CheckpointError, match=r"/c \(no answer from the disk for 0.2 s\); free"):
        next(stream)
    assert not disk.back.is_set()
    disk.back.set()
    checkpoint._disk.settle(timeout_s=20)
    assert path.read_bytes() == before
    assert checkpoint.load(SETTINGS) is not None


def test_a_write_that_comes_late_cannot_spoil_a_newer_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "c"
    checkpoint = Checkpoint(path, {"seed": 1})
    stream = controller(MemoryMesh(), max_in_flight=1, checkpoint=checkpoint).run(3)
    next(stream)
    with (tmp_path / "c.partial").open("wb", buffering=0) as late:
        next(stream)
        late.write(b"an older state")
    assert checkpoint.load(SETTINGS) is not None


def test_a_journal_that_stalls_is_named_and_keeps_its_whole_lines(
    tmp_path: Path, disk: Disk
) -> None:
    journal = Journal(tmp_path / "journal", REQUEST, (), 0)
    journal._file.close()
    journal._file = File(journal.path, disk)
    journal.add(record(0), None)
    disk.stalls.set()
    with pytest.raises(RecordingError, match=r"/journal \(no answer from the disk for 0.2 s\)"):
        journal.add(record(1), None)
    assert not disk.back.is_set()
    assert [told.chunk_index for told, _ in read(tmp_path / "journal").entries] == [0]
    disk.back.set()
    journal._disk.settle(timeout_s=20)
    journal.close()


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
        writer._drain()
    disk.stalls.set()
    writer.suspend()
    assert not disk.back.is_set()
    disk.back.set()
    writer._thread.settle(timeout_s=20)
    with writer_for(path, resume=True) as resumed:
        assert resumed.held_chunks == num_chunks
        resumed.write(noise())
    assert num_frames_in(path) == (num_chunks + 1) * CHUNK
