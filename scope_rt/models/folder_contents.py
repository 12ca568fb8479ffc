"""The fingerprint of a model folder and the checksums of its weights come from one read of it.

Ranks compare fingerprints before they load, and each reads its own slices only: so one rank of a
machine reads the whole folder once (the others wait for it), and `content_cache` keeps what it
found. After that, as long as no file changes, a fingerprint costs one `stat` per file, and weights
are read by slice alone. So a machine reads a folder once more than its weights need, the first time
it sees it; and the files of the weights again for each new dtype of use.

Kept checksums are also what finds a disk that gives other bytes later than it did then: the shards
that ranks load no longer add up to them.
"""

import hashlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from io import FileIO
from pathlib import Path

import torch

from scope_contracts.errors import UserInputError
from scope_rt.bit_digest import MODULUS, bit_digest
from scope_rt.models.content_cache import ContentCache, FileContent, Stamp
from scope_rt.models.weight_files import StoredTensor, TensorReader, WeightFiles
from scope_rt.tensors import NAMES

_PIECE_BYTES = 4 << 20
_IGNORED = (".", "__pycache__")
"""Beginnings of names that are no part of a model."""


class FolderContents:
    """What the files of one model folder hold, read when it is first asked for."""

    def __init__(self, folder: Path, weights: WeightFiles, *, cache: ContentCache | None) -> None:
        self._folder, self._weights, self._cache = folder, dict(weights.by_file()), cache
        self._known: dict[str, FileContent] = {}

    def fingerprint(self, dtype: torch.dtype | None = None) -> str:
        """SHA-256 over names and bytes of all files but hidden ones.

        Args:
            dtype: of use, where `checksums` will be asked for too: then one read gives both.

        Raises:
            UserInputError: a file cannot be read.
        """
        digest = hashlib.sha256()
        for name, content in sorted(self._read(dtype).items()):
            digest.update(name.encode())
            digest.update(bytes.fromhex(content.sha256))
        return digest.hexdigest()

    def checksums(self, dtype: torch.dtype) -> dict[str, int]:
        """The checksum of every whole weight in the dtype of use, by its diffusers name.

        Raises:
            UserInputError: a file cannot be read.
        """
        contents = self._read(dtype)
        return {
            name: contents[self._name(path)].checksums[_key(dtype)][name]
            for path, tensors in self._weights.items()
            for name, _ in tensors
        }

    def _read(self, dtype: torch.dtype | None) -> Mapping[str, FileContent]:
        """What all files hold now; only files that changed, or lack checksums, are read."""
        try:
            paths = {*_files(self._folder), *self._weights}
            stamps = {self._name(path): Stamp.of(path) for path in paths}
            if self._lacking(stamps, dtype) and self._cache is not None:
                self._known |= self._cache.load()
            if not self._lacking(stamps, dtype):
                return {name: self._known[name] for name in stamps}
            if self._cache is None:
                return self._read_lacking(stamps, dtype)
            with self._cache.lock():
                self._known |= self._cache.load()
                return self._read_lacking(stamps, dtype)
        except OSError as error:
            raise UserInputError(
                f"cannot read {error.filename or self._folder}: {error.strerror}; copy it again"
            ) from error

    def _lacking(self, stamps: Mapping[str, Stamp], dtype: torch.dtype | None) -> list[str]:
        """The files of which too little is known."""
        needed: dict[str, set[str]] = {}
        if dtype is not None:
            for path, tensors in self._weights.items():
                needed[self._name(path)] = {name for name, _ in tensors}
        lacking = []
        for name, stamp in stamps.items():
            known = self._known.get(name)
            if known is None or known.stamp != stamp:
                lacking.append(name)
            elif dtype is not None:
                sums = known.checksums.get(_key(dtype), {})
                lacking += [name] if needed.get(name, set()) - sums.keys() else []
        return lacking

    def _read_lacking(
        self, stamps: Mapping[str, Stamp], dtype: torch.dtype | None
    ) -> Mapping[str, FileContent]:
        """Read what is lacking; what may change unnoticed is returned, but not remembered.

        Each file is kept at once, so that a start that ran out of time helps the next one.
        """
        contents = {name: self._known.get(name) for name in stamps}
        for name in self._lacking(stamps, dtype):
            now_ns = time.time_ns()  # a write from here on changes the stamp of a settled file
            content = self._read_file(self._folder / name, stamps[name], dtype)
            known = contents[name]
            if known is not None and (known.stamp, known.sha256) == (content.stamp, content.sha256):
                content = replace(content, checksums={**known.checksums, **content.checksums})
            contents[name] = content
            if content.stamp.is_settled(now_ns):
                self._known[name] = content
            self._known = {name: known for name, known in self._known.items() if name in stamps}
            if self._cache is not None:
                self._cache.save(self._known)
        return {name: content for name, content in contents.items() if content is not None}

    def _read_file(self, path: Path, stamp: Stamp, dtype: torch.dtype | None) -> FileContent:
        tensors = self._weights.get(path)
        if tensors is None or dtype is None:
            with FileIO(path) as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            return FileContent(stamp=stamp, sha256=sha256, checksums={})
        digest, sums = hashlib.sha256(), dict[str, int]()
        with TensorReader(path) as reader:
            digest.update(_bytes(reader, 0, tensors[0][1].offset))
            for name, tensor in tensors:
                sums[name] = 0
                for first_row, rows in _pieces(reader, tensor):
                    digest.update(rows.view(torch.uint8).numpy().data)
                    part = bit_digest(rows.to(dtype), first_row=first_row)
                    sums[name] = (sums[name] + part) % MODULUS
        return FileContent(stamp=stamp, sha256=digest.hexdigest(), checksums={_key(dtype): sums})

    def _name(self, path: Path) -> str:
        return path.relative_to(self._folder).as_posix()


@cache
def _key(dtype: torch.dtype) -> str:
    """Under which checksums in the dtype of use are kept: those of another function are others."""
    return f"{NAMES[dtype]} {bit_digest(torch.arange(9.0)):x}"


def _files(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """All files below `folder`, through links too; one that leads back to `above` is not taken."""
    real = folder.resolve()
    if real in above:
        return
    for path in folder.iterdir():
        if path.name.startswith(_IGNORED):
            continue
        if path.is_dir():
            yield from _files(path, (*above, real))
        elif path.is_file():
            yield path


def _pieces(reader: TensorReader, tensor: StoredTensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Whole rows of `tensor` and the first one's number; each piece is overwritten by the next."""
    num_rows = tensor.shape[0] if tensor.shape else 1
    row_bytes = tensor.num_bytes // max(1, num_rows)
    at_a_time = max(1, _PIECE_BYTES // max(1, row_bytes))
    buffer = torch.empty((min(num_rows, at_a_time), row_bytes), dtype=torch.uint8)
    for first_row in range(0, num_rows, at_a_time):
        rows = buffer[: num_rows - first_row]
        reader.fill(rows.flatten().numpy().data, tensor.offset + first_row * row_bytes)
        yield first_row, rows.view(tensor.dtype)


def _bytes(reader: TensorReader, start: int, end: int) -> bytearray:
    read = bytearray(end - start)
    reader.fill(memoryview(read), start)
    return read
