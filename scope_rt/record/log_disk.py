"""What is done to a stream log's file: it is opened for one writer, begun or resumed, and grows.

All here blocks for as long as the disk takes; who must not wait calls it on another thread.
"""

import os
from contextlib import suppress
from pathlib import Path

from scope_contracts.errors import ContractError, UserInputError
from scope_contracts.log_file import MAGIC, end_of_whole, refuse_special
from scope_rt.file_lock import open_locked


def open_log(path: Path, *, must_exist: bool) -> int:
    """Open `path` to read and write; raises `OSError`, or `UserInputError` where it is in use."""
    refuse_special(path)
    if not must_exist:
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return open_locked(path, must_exist=must_exist)
    except BlockingIOError:
        raise UserInputError(
            f"stream log {path}: another process is writing it; end that one or choose another file"
        ) from None


def begin_log(file: int) -> int:
    """Remove what is there; the end of the new log. Raises `OSError`."""
    os.ftruncate(file, 0)
    write_at(file, 0, MAGIC)
    return len(MAGIC)


def resume_log(file: int, path: Path, *, at_least: int) -> int:
    """The end of the whole records, behind which all is cut off.

    Raises `OSError`, and `UserInputError` where the log is damaged or shorter than `at_least`.
    """
    way_out = f"to start the stream anew, delete {path}"
    with os.fdopen(os.dup(file), "rb") as reading:
        try:
            end = end_of_whole(reading)
        except ContractError as error:
            raise UserInputError(
                f"stream log {path}: cannot be resumed ({error}); {way_out}"
            ) from error
    if end < max(1, at_least):
        raise UserInputError(
            f"stream log {path}: got {end} bytes of whole records, the snapshot of its stream "
            f"wants {at_least} or more; {way_out}"
        )
    os.ftruncate(file, end)
    return end


def cut_off(file: int, end: int) -> None:
    """Remove what was written of a record; raises nothing."""
    with suppress(OSError):
        os.ftruncate(file, end)


def write_at(file: int, start: int, data: bytes) -> None:
    """Write all of `data` at byte `start`; raises `OSError` where there is no room for it."""
    left = memoryview(data)
    while left:
        num_written = os.pwrite(file, left, start)
        left, start = left[num_written:], start + num_written
