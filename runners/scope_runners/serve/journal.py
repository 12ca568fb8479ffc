"""What a server told its clients outlives it: one line a fact with its checksum, appended before
anybody is told. A last line that is cut short was never told; any other damage is named."""

import errno
import json
import logging
import os
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scope_contracts.errors import ScopeError, UserInputError
from scope_rt.disk import mend
from scope_rt.output_file import replacing

_CLOSED = -1
MOST_APPENDED = 20_000
"""Facts after which a journal is written anew: the next server reads so many within a second."""
_LOG = logging.getLogger(__name__)
Fact = Mapping[str, Any]


class JournalError(ScopeError):
    """What must not be forgotten cannot be written: the session cannot go on."""


class Journal:
    """Appends facts to one file; any thread may."""

    def __init__(self, path: Path) -> None:
        """Opens or makes the file; what is after its last whole line is cut off."""
        self.path = path
        self._lock = threading.Lock()
        self._num_appended = 0
        self._end = sum(len(line) for line, _ in _lines(path)) if path.exists() else 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._file, self._end)

    def append(self, fact: Fact) -> None:
        """It is with the operating system on return: it outlives this process, not a loss of power.

        Raises:
            JournalError: the disk takes no more, or the file was let go.
        """
        line = _line(fact)
        try:
            with self._lock:
                # What a full disk took of a line before is no part of this one.
                if os.pwrite(self._file, line, self._end) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._end += len(line)
                self._num_appended += 1
        except OSError as error:
            raise JournalError(
                f"cannot write {self.path} ({error.strerror}); {mend(error)}, and serve the "
                "folder again"
            ) from error

    @property
    def is_long(self) -> bool:
        """Whether it is worth to write it anew: the next server reads all of it."""
        return self._num_appended >= MOST_APPENDED

    def replace(self, facts: Sequence[Fact]) -> None:
        """Let it say only what still matters; nobody appends meanwhile. Where the disk takes no
        copy, it stays as it is."""
        with self._lock:
            self._num_appended = 0
            try:
                rewrite(self.path, facts)
                file = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
            except (OSError, UserInputError) as error:
                _LOG.warning("%s stays long: %s", self.path, error)
                return
            os.close(self._file)
            self._file, self._end = file, os.fstat(file).st_size

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        with self._lock:
            if self._file != _CLOSED:
                os.close(self._file)
                self._file = _CLOSED  # the number may be another file's by now


def read_journal(path: Path) -> Iterator[Fact]:
    """The facts of a file, in order.

    Raises:
        UserInputError: it is damaged, or unreadable.
    """
    for _, fact in _lines(path):
        yield fact


def rewrite(path: Path, facts: Sequence[Fact]) -> None:
    """Replace a file by one that says only what still matters."""
    with replacing(path, suffixes=(path.suffix,)) as partial:
        partial.write_bytes(b"".join(map(_line, facts)))


def _line(fact: Fact) -> bytes:
    text = json.dumps(fact, separators=(",", ":"), sort_keys=True).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _lines(path: Path) -> Iterator[tuple[bytes, Fact]]:
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise UserInputError(f"cannot read the journal {path} ({error.strerror})") from error
    for number, line in enumerate(lines, start=1):
        is_last = number == len(lines)
        checksum, _, text = line.rstrip(b"\n").partition(b" ")
        if is_last and not line.endswith(b"\n"):
            return
        try:
            if int(checksum, 16) != zlib.crc32(text):
                raise ValueError("its checksum is another")
            yield line, json.loads(text)
        except ValueError as error:
            raise UserInputError(
                f"the journal {path} is damaged in line {number} ({error}); to give the session "
                f"up, remove {path.parent}"
            ) from error
