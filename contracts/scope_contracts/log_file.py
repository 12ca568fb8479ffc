"""A stream log only grows, by whole records, and says how many a crash has left it.

    file    MAGIC, then frames
    frame   u32 length, u32 CRC-32, that many bytes; little-endian
    record  a frame that holds the record, and one more that holds its blob where it has one

Whatever the bytes of a file, reading it ends in records or in a named `ContractError`, in memory
bounded by the caps. What a crash cut off is told apart from damage: a torn tail may be cut away,
damage is never overwritten. Torn is a last record that is cut short, or that a file system made
room for and never filled; nothing whole lies after it.
"""

import errno
import os
import re
import struct
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgpack

from scope_contracts.errors import ContractError, FieldError, WireError, mismatch
from scope_contracts.log_records import (
    MAX_RECORD_BYTES,
    Opened,
    Record,
    decode_record,
    encode_record,
)

MAGIC = b"\x89SCOPE\r\n"
"""Neither text nor UTF-8, and broken by whatever rewrites line ends."""
_FRAME = struct.Struct("<II")
_SCAN_BYTES = 2**20
_SECTOR_BYTES = 512
"""The least that a file system fills at a time."""
_RECORD_BEGINS = re.compile(rb"(?s:[\x80-\x8f]|\xde..)\xa4at_s")
"""How the body of every record begins: a map, whose first key is that of the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A record and where it lies in its file, in bytes; the blob ends where the entry does."""

    record: Record
    start: int
    end: int


def pack(record: Record, blob: bytes = b"") -> bytes:
    """The bytes that append `record` to a file.

    Raises `FieldError` for a value its field does not allow and for a blob of another size than
    the record says, `WireError` for a record over `MAX_RECORD_BYTES`.
    """
    if len(blob) != record.num_blob_bytes:
        want = f"the {record.num_blob_bytes} of the record"
        raise FieldError(mismatch("blob bytes", got=len(blob), want=want))
    body = encode_record(record)
    return b"".join((_framed(body), body, _framed(blob), blob) if blob else (_framed(body), body))


class LogReader:
    """The whole records of a file, each time from its start; the file must be seekable.

    All of it is read, and each record encoded again and compared, but where it is not `thorough`:
    an hour of video is gigabytes of latents, which are then stepped over, and a damaged one is not
    noticed. Records are held against their checksums in any case.
    """

    def __init__(self, file: BinaryIO, *, thorough: bool = True) -> None:
        self._file = file
        self._thorough = thorough
        self._num_bytes = 0
        self.torn_bytes = 0
        """Bytes after the last whole record that was read."""

    def __iter__(self) -> Iterator[Entry]:
        """Raises `ContractError` at the first byte that no crash explains, after what is whole."""
        self.torn_bytes = self._num_bytes = self._file.seek(0, os.SEEK_END)
        if not self._has_magic():
            return
        start = len(MAGIC)
        self.torn_bytes -= start
        while entry := self._entry(start):
            if start == len(MAGIC) and not isinstance(entry.record, Opened):
                raise WireError(mismatch("first record", got=entry.record.kind, want="opened"))
            start = entry.end
            self.torn_bytes = self._num_bytes - start
            yield entry

    def entry(self, start: int) -> Entry:
        """The record that was read at byte `start`; raises `WireError` where it is gone."""
        self._num_bytes = self._file.seek(0, os.SEEK_END)
        entry = self._entry(start)
        if entry is None:
            raise WireError(f"byte {start}: the log became shorter")
        return entry

    def blob(self, entry: Entry) -> bytes:
        """The bytes that follow the record of `entry`, wherever that was read.

        Raises `WireError` where they are others than were written.
        """
        if not (num_bytes := entry.record.num_blob_bytes):
            return b""
        self._num_bytes = self._file.seek(0, os.SEEK_END)
        start = entry.end - num_bytes - _FRAME.size
        blob = self._body(start, range(num_bytes, num_bytes + 1))
        if blob is None:
            raise WireError(f"byte {start}: the log became shorter")
        return blob

    def ends_whole(self) -> bool:
        """Whether the file ends with a whole record; reads no more than headers and that record.

        An hour of video is gigabytes of latents, and whoever appends to it is in a hurry.
        """
        self._num_bytes = self._file.seek(0, os.SEEK_END)
        if not self._has_magic():
            return False
        start, last_frames = len(MAGIC), deque[int](maxlen=2)
        while start < self._num_bytes:
            self._file.seek(start)
            header = self._file.read(_FRAME.size)
            if len(header) < _FRAME.size or not any(header):
                return False
            last_frames.append(start)
            start += _FRAME.size + _FRAME.unpack(header)[0]
        return any(self._is_last(frame) for frame in last_frames)

    def _is_last(self, start: int) -> bool:
        try:
            entry = self._entry(start)
        except ContractError:
            return False
        return entry is not None and entry.end == self._num_bytes

    def _has_magic(self) -> bool:
        """Whether the file begins as it must; False where a crash cut even that off."""
        self._file.seek(0)
        magic = self._file.read(len(MAGIC))
        if not MAGIC.startswith(magic):
            fix = "is this a stream log of scope-rt?"
            raise WireError(mismatch("file", got=magic, want=f"{MAGIC!r} first", fix=fix))
        return magic == MAGIC

    def _entry(self, start: int) -> Entry | None:
        """The record at `start`; None where a crash cut it off."""
        body = self._body(start, range(1, MAX_RECORD_BYTES + 1))
        if body is None:
            return None
        record = decode_record(body, is_compared=self._thorough)
        end = start + _FRAME.size + len(body)
        if num_bytes := record.num_blob_bytes:
            if not self._has_blob(end, num_bytes):
                return None
            end += _FRAME.size + num_bytes
        return Entry(record=record, start=start, end=end)

    def _has_blob(self, start: int, num_bytes: int) -> bool:
        """Whether the blob in the frame at `start` is whole; False where a crash cut it off."""
        end = start + _FRAME.size + num_bytes
        if not self._thorough and end < self._num_bytes:  # the last one may be torn
            self._file.seek(start)
            if _FRAME.unpack(self._file.read(_FRAME.size))[0] == num_bytes:
                return True
        return self._body(start, range(num_bytes, num_bytes + 1)) is not None

    def _body(self, start: int, lengths: range) -> bytes | None:
        """What the frame at `start` holds; None where a crash cut it off."""
        self._file.seek(start)
        header = self._file.read(_FRAME.size)
        if len(header) < _FRAME.size:
            return None
        length, checksum = _FRAME.unpack(header)
        end = start + _FRAME.size + length
        if length not in lengths:  # a file system may have grown the file and not yet filled it
            is_torn = self._is_zero_from(start)
        elif end > self._num_bytes:
            is_torn = not self._has_record_from(start)
        else:
            body = self._file.read(length)
            if len(body) == length and zlib.crc32(body) == checksum:
                return body
            is_torn = self._is_zero_from(end) and not self._has_record_from(start)
            is_torn &= end < self._num_bytes or _was_never_filled(body, end - length)
        if not is_torn:
            raise WireError(f"byte {start}: the log is damaged; what comes before it is whole")
        return None

    def _has_record_from(self, start: int) -> bool:
        """Whether a whole record lies at `start` or after it: then no crash cut off what is there.

        Lengths are not believed: one that was changed may hide all that follows it.
        """
        overlap = _FRAME.size + MAX_RECORD_BYTES
        for piece in range(start, self._num_bytes, _SCAN_BYTES - overlap):
            self._file.seek(piece)
            data = self._file.read(_SCAN_BYTES)
            for found in _RECORD_BEGINS.finditer(data, _FRAME.size):
                body = data[found.start() : found.start() + MAX_RECORD_BYTES]
                _, checksum = _FRAME.unpack_from(data, found.start() - _FRAME.size)
                if zlib.crc32(body[: _num_map_bytes(body)]) == checksum:
                    return True
        return False

    def _is_zero_from(self, start: int) -> bool:
        self._file.seek(start)
        while data := self._file.read(_SCAN_BYTES):
            if data.count(0) != len(data):
                return False
        return True


def end_of_whole(file: BinaryIO) -> int:
    """The byte after the last whole record; 0 where there is none.

    Raises `ContractError` for a file that is no log, or ends in damage that no crash explains.
    """
    reader, end = LogReader(file), 0
    if reader.ends_whole():
        return file.seek(0, os.SEEK_END)
    for entry in reader:
        end = entry.end
    return end


def refuse_special(path: Path) -> None:
    """Raise `OSError` for what is no file: opening a pipe that nobody reads never returns."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def _num_map_bytes(data: bytes) -> int:
    """How long the map is that `data` begins with; 0 where it is none, or is cut off."""
    unpacker = msgpack.Unpacker()
    unpacker.feed(data)
    try:
        unpacker.skip()
    except (ValueError, msgpack.UnpackException):
        return 0
    return int(unpacker.tell())


def _was_never_filled(body: bytes, start: int) -> bool:
    """Whether a whole sector's part of `body`, which lies at `start` of its file, is zeros."""
    first = -start % _SECTOR_BYTES
    parts = (body[at : at + _SECTOR_BYTES] for at in range(first, len(body), _SECTOR_BYTES))
    return any(part.count(0) == len(part) for part in parts)


def _framed(body: bytes) -> bytes:
    return _FRAME.pack(len(body), zlib.crc32(body))
