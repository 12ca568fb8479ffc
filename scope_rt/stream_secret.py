"""A secret per stream, known to its ranks alone: it is never printed, logged, recorded or sent.

It comes from `SCOPE_STREAM_SECRET`, or from a file that only its owner can read. Our launcher makes
one for every stream that it starts.
"""

import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from scope_contracts.errors import UserInputError
from scope_rt.environment_names import SECRET, SECRET_FILE

FEWEST_BYTES = 32
_MOST_BYTES = 4096
_HOW = "`openssl rand -hex 32` makes one"


@dataclass(frozen=True, slots=True)
class StreamSecret:
    """Bytes that nobody but the ranks of one stream knows."""

    raw: bytes = field(repr=False)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self | None:
        """What the environment gives; None where it gives none.

        Raises:
            UserInputError: it cannot be used; the sentence says which of both, and never shows it.
        """
        text, path = environ.get(SECRET), environ.get(SECRET_FILE)
        if text is not None and path is not None:
            raise UserInputError(f"{SECRET} and {SECRET_FILE} are both set; unset one of them")
        if text is not None:
            return cls._of(text.encode(errors="surrogateescape"), SECRET)
        return None if path is None else cls._of(_read(path), f"the file of {SECRET_FILE}")

    @classmethod
    def _of(cls, data: bytes, source: str) -> Self:
        raw = data.strip()
        if not FEWEST_BYTES <= len(raw) <= _MOST_BYTES:
            raise UserInputError(
                f"{source} holds a secret of {len(raw)} bytes; give {FEWEST_BYTES} to "
                f"{_MOST_BYTES} ({_HOW})"
            )
        return cls(raw)


@contextmanager
def new_secret_file() -> Iterator[Path]:
    """A file of mode 0600 with a new secret, in a folder of its own, for as long as the block runs.

    Raises:
        UserInputError: there is no folder for temporary files.
    """
    try:
        folder = tempfile.TemporaryDirectory(prefix="scope-")
    except OSError as error:
        raise UserInputError(
            f"the stream's secret needs a folder for temporary files ({error.strerror}); set "
            "TMPDIR to one that can be written"
        ) from error
    with folder as name:
        path = Path(name, "secret")
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(number, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(FEWEST_BYTES))
        yield path


def _read(path: str) -> bytes:
    """The bytes of a regular file that is its owner's alone."""
    try:
        # A named pipe would wait for its writer.
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UserInputError(
            f"{SECRET_FILE}: cannot read {path} ({error.strerror}); give a file with the secret"
        ) from error
    try:
        _check_owner_alone(path, os.fstat(number))
        return os.read(number, _MOST_BYTES + 1)
    finally:
        os.close(number)


def _check_owner_alone(path: str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise UserInputError(f"{SECRET_FILE}: {path} is no file; give a file with the secret")
    mode = stat.S_IMODE(status.st_mode)
    if mode not in (0o600, 0o400):
        raise UserInputError(
            f"{SECRET_FILE}: {path} has mode {mode:04o}, so others may read it; `chmod 600` it, "
            "and make a new secret if others could"
        )
    if status.st_uid not in (os.getuid(), 0):
        raise UserInputError(
            f"{SECRET_FILE}: {path} belongs to user {status.st_uid}; give a file of your own"
        )
