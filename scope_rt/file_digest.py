"""What a file holds is told by 16 bytes, so that later it can be said whether it still does."""

import hashlib
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Self

_DIGEST_BYTES = 16
_PIECE_BYTES = 2**20
_blake2b_128 = partial(blake2b, digest_size=_DIGEST_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    """The length of a file, and the BLAKE2b-128 of its bytes in hexadecimal."""

    num_bytes: int
    blake2b: str

    @classmethod
    def of(cls, path: Path) -> Self:
        """Read the whole file. Raises `OSError`."""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, _blake2b_128)
            return cls(num_bytes=file.tell(), blake2b=digest.hexdigest())


def digest_of(data: bytes) -> str:
    """The BLAKE2b-128 of `data`, in hexadecimal."""
    return _blake2b_128(data).hexdigest()


class RunningDigest:
    """The digest of a growing file, at the places that are asked for; each byte is read once."""

    def __init__(self, path: Path) -> None:
        self._path, self._digest, self._end = path, _blake2b_128(), 0

    def before(self, end_bytes: int) -> str:
        """Of all bytes before `end_bytes`, which is no less than it was last. Raises `OSError`."""
        with self._path.open("rb", buffering=0) as file:
            file.seek(self._end)
            while data := file.read(min(_PIECE_BYTES, end_bytes - self._end)):
                self._digest.update(data)
                self._end += len(data)
        return self._digest.hexdigest()
