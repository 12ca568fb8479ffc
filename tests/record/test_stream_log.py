"""Whatever happens to its file, a stream log keeps whole records and never ends the stream."""

import errno
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scope_contracts.errors import UserInputError
from scope_contracts.log_file import LogReader, pack
from scope_contracts.log_records import Closed, Durable, Finished, Opened, Planned, Record
from scope_lab.sample_log import durable, finished, opened, planned, story, write
from scope_rt.faults import FaultPoint
from scope_rt.record import stream_log
from scope_rt.record.stream_log import StreamLog
from tests.record.stalled_disk import StalledDisk
from tests.video.test_full_disk import largest_file, small_disk

__all__ = ["small_disk"]
LATENTS = range(1000)


def read(path: Path) -> tuple[list[Record], list[bytes], int]:
    with path.open("rb") as file:
        reader = LogReader(file)
        entries = list(reader)
        blobs = [reader.blob(entry) for entry in entries]
        return [entry.record for entry in entries], blobs, reader.torn_bytes


def kinds(path: Path) -> list[type[Record]]:
    return [type(record) for record in read(path)[0]]


class FullAt:
    """A disk that is full at the n-th records."""

    def __init__(self, *numbers: int) -> None:
        self.numbers, self.number = numbers, 0

    def reach(self, point: FaultPoint, chunk: int, value: Any) -> Any:
        assert point is FaultPoint.RECORD
        self.number += 1
        if self.number in self.numbers:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return value


def log_chunks(log: StreamLog, num_chunks: int = 2) -> None:
    log.append(opened())
    for index in range(num_chunks):
        log.append(planned(index))
        log.append(*finished(index, values=LATENTS))


@pytest.mark.parametrize("record_latents", [True, False])
def test_records_are_kept_in_order_and_latents_where_that_was_asked_for(
    tmp_path: Path, record_latents: bool
) -> None:
    path = tmp_path / "new" / "a.scope"
    log = StreamLog(path, record_latents=record_latents)
    log_chunks(log, 1)
    assert log.offset == path.stat().st_size
    log.close()
    log.close()
    records, blobs, torn_bytes = read(path)
    want, latents = finished(0, values=LATENTS)
    assert kinds(path) == [Opened, Planned, Finished]
    assert torn_bytes == 0
    assert blobs[2] == (latents if record_latents else b"")
    assert isinstance(records[2], Finished)
    assert records[2].latents == (want.latents if record_latents else None)
    assert records[2].latents_sha256 == want.latents_sha256


def test_a_full_disk_costs_latents_first_and_the_log_can_still_be_resumed(tmp_path: Path) -> None:
    path = tmp_path / "a.scope"
    log = StreamLog(path, record_latents=True, faults=FullAt(5))
    log_chunks(log, 4)
    log.close()
    assert log.failure is None
    assert log.latents_failure is not None
    assert "no latents from chunk 1 on (No space left on device)" in log.latents_failure
    has_latents = [r.latents is not None for r in read(path)[0] if isinstance(r, Finished)]
    assert has_latents == [True, False, False, False]


@pytest.mark.parametrize(("full_at", "num_records"), [((4,), 3), ((5, 6), 4)])
def test_a_full_disk_ends_the_log_at_a_whole_record_and_not_the_stream(
    tmp_path: Path,
    full_at: tuple[int, ...],
    num_records: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("scope_rt"), "propagate", True)
    path = tmp_path / "a.scope"
    log = StreamLog(path, record_latents=True, faults=FullAt(*full_at))
    log_chunks(log, 4)
    offset = log.offset
    log.append(Closed(at_s=0.0))
    log.close()
    assert len(kinds(path)) == num_records
    assert path.stat().st_size == offset == log.offset
    assert log.failure is not None
    assert f"{path} ended after {offset} bytes (No space left on device)" in log.failure
    assert "\n" not in log.failure
    assert log.failure in caplog.messages, "whoever operates the stream was not told"


def test_a_record_that_fits_only_in_part_is_taken_back(tmp_path: Path) -> None:
    """A file size limit of the operating system stands for a disk that fills in mid-record."""
    path = tmp_path / "a.scope"
    log = StreamLog(path)
    log.append(opened())
    log.append(planned(0))
    with largest_file(log.offset + 100):
        log.append(planned(1))
        log.flush()
    assert log.failure is not None
    assert "File too large" in log.failure
    log.close()
    assert kinds(path) == [Opened, Planned]
    assert read(path)[2] == 0


def test_of_records_that_are_written_together_those_are_kept_for_which_there_is_room(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.scope"
    log = StreamLog(path, record_latents=True)
    log.append(opened())
    first, last = planned(0), finished(0, values=LATENTS)
    with largest_file(log.offset + len(pack(first)) + len(pack(*last)) - 100):
        log.append(first)
        log.append(*last)
        log.append(planned(1))
        log.append(*finished(1, values=LATENTS))
        log.flush()
    assert "no latents from chunk 0 on (File too large)" in (log.latents_failure or "")
    log.close()
    records, blobs, torn_bytes = read(path)
    assert [type(record) for record in records] == [Opened, *(Planned, Finished) * 2]
    assert torn_bytes == 0
    assert not any(blobs)


def test_the_records_of_a_chunk_are_written_by_one_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_bytes: list[int] = []

    def pwrite(file: int, data: bytes, start: int) -> int:
        num_bytes.append(len(data))
        return written(file, data, start)

    log = StreamLog(tmp_path / "a.scope", record_latents=True)
    log.append(opened())
    log.flush()
    written = os.pwrite
    monkeypatch.setattr(os, "pwrite", pwrite)
    log.append(planned(0))
    log.append(*finished(0, values=LATENTS))
    log.write_soon()
    log.close()
    assert num_bytes == [len(pack(planned(0))) + len(pack(*finished(0, values=LATENTS)))]


@pytest.mark.timeout(20)
def test_a_plan_whose_chunk_does_not_come_is_written_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.scope"
    log = StreamLog(path)
    log.append(opened())
    log.flush()
    log.append(planned(0))
    while kinds(path) != [Opened, Planned]:
        time.sleep(0.05)
    log.close()


def test_a_small_disk_that_fills_keeps_whole_records_and_is_resumed_once_there_is_room(
    small_disk: Path,
) -> None:
    path, ballast = small_disk / "a.scope", small_disk / "ballast"
    ballast.write_bytes(bytes(1_900_000))
    log = StreamLog(path, record_latents=True)
    log.append(opened())
    index = 0
    while log.failure is None and index < 10_000:
        log.append(*finished(index, values=LATENTS))
        log.flush()
        index += 1
    assert log.latents_failure is not None
    assert log.failure is not None
    log.close()
    records, _, torn_bytes = read(path)
    assert (len(records), torn_bytes) == (index, 0)
    ballast.unlink()
    again = StreamLog(path, resume=True, at_least=log.offset)
    again.append(planned(1))
    again.close()
    assert len(read(path)[0]) == index + 1


@pytest.fixture
def stalled_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[StalledDisk]:
    disk = StalledDisk()
    monkeypatch.setattr(os, "pwrite", disk.waiting(os.pwrite))
    monkeypatch.setattr(stream_log, "STALL_TIMEOUT_S", 0.5)
    monkeypatch.setattr(stream_log, "_CLOSE_TIMEOUT_S", 0.1)
    yield disk
    disk.back.set()


def test_a_disk_that_does_not_answer_ends_the_log_and_a_late_write_changes_nothing(
    tmp_path: Path, stalled_disk: StalledDisk
) -> None:
    path = tmp_path / "a.scope"
    log = StreamLog(path, record_latents=True)
    log_chunks(log, 1)
    log.flush()
    stalled_disk.stalls.set()
    log.append(*finished(1, values=LATENTS))
    log.flush()
    assert log.failure is not None
    assert "no answer from the disk for 0.5 s" in log.failure
    log.append(planned(2))
    log.close()
    assert not stalled_disk.back.is_set()
    stalled_disk.back.set()
    log._disk.settle(timeout_s=20)
    assert kinds(path) == [Opened, Planned, Finished]
    assert path.stat().st_size == log.offset


def test_whatever_keeps_a_record_from_being_written_ends_the_log_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(file: int, start: int, data: bytes) -> None:
        raise TypeError("a bug of ours")

    log = StreamLog(tmp_path / "a.scope")
    log.append(opened())
    before = log.offset
    monkeypatch.setattr(stream_log, "write_at", wrong)
    log.append(planned(0))
    log.flush()
    monkeypatch.undo()
    log.append(planned(1))
    assert log.offset == before
    assert "TypeError: a bug of ours" in (log.failure or "")
    log.close()
    assert kinds(tmp_path / "a.scope") == [Opened], "nothing follows what is missing"


def test_a_writer_on_another_thread_may_append_too(tmp_path: Path) -> None:
    path = tmp_path / "a.scope"
    log = StreamLog(path)
    log.append(opened())

    def append_many() -> None:
        for index in range(50):
            log.append(durable(index))

    threads = [threading.Thread(target=append_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    assert log.failure is None
    assert kinds(path) == [Opened] + [Durable] * 200


def test_two_living_writers_of_one_log_are_refused_and_harm_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.scope"
    log = StreamLog(path)
    log.append(opened())
    log.flush()
    for resume in (False, True):
        with pytest.raises(UserInputError, match="another process is writing it; end that one"):
            StreamLog(path, resume=resume)
    assert kinds(path) == [Opened]
    log.close()
    StreamLog(path, resume=True).close()
    log = StreamLog(path)
    log.remove()
    assert not path.exists()


def test_a_new_log_replaces_a_file_and_a_resumed_one_continues_after_what_is_whole(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "a.scope", story()[:5])
    whole = path.read_bytes()
    path.write_bytes(whole + b"\x10\x00")
    log = StreamLog(path, resume=True, at_least=len(whole))
    log.append(opened(resumed_at_chunk=1))
    log.close()
    assert [record for record, _ in story()[:5]] == read(path)[0][:-1]
    log = StreamLog(path)
    log.append(opened())
    log.close()
    assert kinds(path) == [Opened]


def damaged(data: bytes) -> bytes:
    return data[:300] + bytes([data[300] ^ 1]) + data[301:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (damaged, "the log is damaged; what comes before it is whole"),
        (lambda data: b"my holiday notes", "is this a stream log of scope-rt"),
        (lambda data: data[:-1], "bytes of whole records, the snapshot of its stream wants"),
        (lambda data: b"", "got 0 bytes of whole records"),
    ],
    ids=["a flipped byte", "another file", "shorter than its snapshot says", "empty"],
)
def test_what_is_damaged_is_named_and_never_continued(
    tmp_path: Path, content: Any, told: str
) -> None:
    path = write(tmp_path / "a.scope", story())
    num_bytes = path.stat().st_size
    path.write_bytes(left := content(path.read_bytes()))
    with pytest.raises(UserInputError, match=told) as refusal:
        StreamLog(path, resume=True, at_least=num_bytes)
    assert f"to start the stream anew, delete {path}" in str(refusal.value)
    assert path.read_bytes() == left


def test_a_log_that_is_gone_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match=r"cannot be resumed \(No such file"):
        StreamLog(tmp_path / "a.scope", resume=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(20)
@pytest.mark.parametrize("resume", [False, True])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, resume: bool) -> None:
    os.mkfifo(tmp_path / "a.scope")
    with pytest.raises(UserInputError, match="not a regular file"):
        StreamLog(tmp_path / "a.scope", resume=resume)


def test_a_path_that_cannot_be_written_is_said_before_the_stream_starts(tmp_path: Path) -> None:
    (tmp_path / "a.scope").write_bytes(b"")
    for path in (tmp_path, tmp_path / "a.scope" / "b.scope"):
        with pytest.raises(UserInputError, match="choose another file"):
            StreamLog(path)
    with largest_file(3), pytest.raises(UserInputError, match="free disk space"):
        StreamLog(tmp_path / "c.scope")


def test_what_was_appended_is_in_the_file_once_its_offset_is_known(tmp_path: Path) -> None:
    path = tmp_path / "a.scope"
    log = StreamLog(path)
    log.append(opened())
    for index in range(200):
        log.append(planned(index))
    offset = log.offset
    assert path.stat().st_size == offset
    assert len(kinds(path)) == 201
    log.append(planned(200))
    log.append(Closed(at_s=0.0))  # says what became of the stream, so it is written at once
    assert kinds(path)[-1] is Closed
