"""What waits for records to be written is called after them, before any later one, and on time."""

import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from scope_contracts.log_file import LogReader
from scope_lab.sample_log import opened, planned
from scope_rt.record import stream_log
from scope_rt.record.log_disk import write_at
from scope_rt.record.stream_log import StreamLog


def test_a_log_that_was_closed_is_no_disk_that_gives_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_log, "STALL_TIMEOUT_S", 0.5)
    log, saved = StreamLog(tmp_path / "log"), list[int]()
    log.append(opened())
    log.close()
    log.when_written(saved.append)
    assert (log.failure, saved) == (None, [])


def test_what_is_called_when_a_record_is_written_knows_of_no_later_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot that names a retraction it does not know would hide it from who resumes."""
    waits = threading.Event()

    def write_late(*arguments: Any) -> None:
        assert waits.wait(20)
        write_at(*arguments)

    with closing(StreamLog(tmp_path / "log")) as log:
        monkeypatch.setattr(stream_log, "write_at", write_late)
        ends = list[int]()
        log.append(opened())
        first = log.when_written(ends.append)
        log.append(planned(0))
        second = log.when_written(ends.append)
        log.append(planned(1))
        waits.set()
        first()
        second()
        log.flush()
        with open(tmp_path / "log", "rb") as file:
            assert [entry.end for entry in LogReader(file)] == [*ends, log.offset]
