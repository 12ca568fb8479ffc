"""A log that is resumed is read in full: damage behind its latents ends the stream by name."""

import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest

from scope_contracts.errors import IntegrityError, UserInputError
from scope_contracts.log_file import Entry, pack
from scope_contracts.log_records import Closed, encode_record
from scope_lab.sample_log import finished, opened, packed, planned
from scope_rt.record import log_check
from scope_rt.record.log_check import LogCheck
from scope_rt.record.reader import read_progress
from scope_rt.record.stream_log import StreamLog
from tests.record.test_stream_log import kinds

VALUES = range(50)
RECORDS = [(opened(), b""), *(finished(index, values=VALUES) for index in range(8))]
DATA = packed([*RECORDS, (planned(8), b"")])
DATA_END = pack(Closed(at_s=1.0))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a log to resume."""
    path = tmp_path / "a.scope"
    path.write_bytes(DATA)
    return path


def flip(path: Path, position: int) -> None:
    path.write_bytes(DATA[:position] + bytes([DATA[position] ^ 4]) + DATA[position + 1 :])


def in_latents() -> list[int]:
    """A byte of every chunk's latents."""
    return [len(packed(RECORDS[:count])) - 100 for count in range(2, len(RECORDS) + 1)]


def test_a_flipped_byte_anywhere_in_a_resumed_log_is_named_and_none_is_changed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.scope"
    for position in [*range(0, len(DATA), 13), *in_latents()]:
        flip(path, position)
        before = path.read_bytes()
        with pytest.raises((UserInputError, IntegrityError), match=f"{path}") as told:
            log = StreamLog(path, resume=True)
            try:
                log.settle_check()
            finally:
                log.close()
        assert "\n" not in str(told.value)
        assert path.read_bytes() == before


@pytest.mark.parametrize("position", in_latents())
def test_flipped_latents_are_found_while_the_stream_goes_on(tmp_path: Path, position: int) -> None:
    path = tmp_path / "a.scope"
    flip(path, position)
    log = StreamLog(path, resume=True)
    log.append(planned(9))
    with pytest.raises(IntegrityError, match=r"byte \d+: the log is damaged.*scope-rt inspect"):
        log.settle_check()
    with pytest.raises(IntegrityError, match="the log is damaged"):
        _ = log.offset
    log.close()


def test_a_record_in_another_form_than_its_own_is_found_while_the_stream_goes_on(
    tmp_path: Path,
) -> None:
    """Opening the log to resume it does not compare: it has each record's checksum."""
    path = tmp_path / "a.scope"
    fields = msgpack.unpackb(encode_record(Closed(at_s=0.5)))
    body = msgpack.packb({"kind": fields["kind"], "at_s": fields["at_s"]})
    path.write_bytes(DATA + struct.pack("<II", len(body), zlib.crc32(body)) + body + DATA_END)
    assert read_progress(path).closed
    log = StreamLog(path, resume=True)
    with pytest.raises(IntegrityError, match="canonical msgpack"):
        log.settle_check()
    log.close()


def test_a_whole_log_is_resumed_without_a_word_and_its_writes_come_between(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_check, "_TURN_S", 0.0)
    gate = threading.Event()
    entries = LogCheck._entries

    def gated(check: LogCheck) -> Iterator[Entry]:
        for entry in entries(check):
            yield entry
            assert gate.wait(timeout=20)

    monkeypatch.setattr(LogCheck, "_entries", gated)
    log = StreamLog(path, resume=True)
    log.append(planned(9))
    gate.set()
    log.settle_check()
    log.append(Closed(at_s=0.0))
    assert log.offset == path.stat().st_size
    log.close()
    assert kinds(path)[-2:] == [type(planned(9)), Closed]


def test_a_log_that_is_closed_is_read_no_further(path: Path) -> None:
    log = StreamLog(path, resume=True)
    log.close()
    log.settle_check()


def test_a_disk_that_gives_no_answer_to_the_check_is_named(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = threading.Event()
    monkeypatch.setattr(log_check, "STALL_TIMEOUT_S", 0.2)
    monkeypatch.setattr(LogCheck, "_entries", lambda check: iter(lambda: back.wait(20), True))
    log = StreamLog(path, resume=True)
    with pytest.raises(IntegrityError, match=r"no answer from the disk for 0\.2 s"):
        log.settle_check()
    back.set()
    log.close()


def test_a_log_that_is_gone_when_it_is_read_is_named(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    entries = LogCheck._entries

    def gone(check: LogCheck) -> Iterator[Entry]:
        path.unlink()
        return entries(check)

    monkeypatch.setattr(LogCheck, "_entries", gone)
    log = StreamLog(path, resume=True)
    with pytest.raises(IntegrityError, match="No such file"):
        log.settle_check()
    log.close()
