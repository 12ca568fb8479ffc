"""What the files of a model hold. Those of tensors are known by each tensor, so that what ranks
read of them, slice by slice, adds up to it: nobody has to read a file for its digest alone."""

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Self

from torch import Tensor, empty, uint8

from scope_contracts.errors import UserInputError
from scope_rt.bit_digest import MODULUS, bit_digest
from scope_rt.tensor_files.safetensors_file import tensors_of
from scope_rt.tensor_files.state_dict import SAFETENSORS, TORCH
from scope_rt.tensor_files.stored_tensor import StoredTensor, TensorReader
from scope_rt.tensor_files.torch_file import is_plain
from scope_rt.tensor_files.torch_records import (
    Storage,
    rest_digest,
    storages_beside,
    tensors_by_key,
)

MANIFEST_NAME = "scope_manifest.json"
_PIECE_BYTES = 4 << 20
_IGNORED = (".", "__pycache__", MANIFEST_NAME)
"""Beginnings of names that are no part of a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file."""

    rest: str
    """SHA-256 of all that is not in `tensors`; of a whole file, where it is known by none."""
    tensors: Mapping[str, int]
    """`bit_digest` of each, in the file's own dtype, by the names in the file; of a .pt also of
    storages that hold other things, by their record."""

    @property
    def digest(self) -> str:
        """SHA-256 of both."""
        whole = hashlib.sha256(self.rest.encode())
        for name, digest in sorted(self.tensors.items()):
            whole.update(f"{name} {digest:016x}\n".encode())
        return whole.hexdigest()

    def only(self, names: Collection[str]) -> Self:
        """As far as it is known by these tensors."""
        kept = {name: digest for name, digest in self.tensors.items() if name in names}
        return replace(self, tensors=kept)

    def joined(self, other: Self | None) -> Self:
        """With what is known of the same file by other tensors."""
        if other is None or other.rest != self.rest:
            return self
        return replace(self, tensors={**other.tensors, **self.tensors})


def entry_of(path: Path, only: Collection[str] | None = None) -> FileEntry:
    """Read all of `path`; of a file of tensors `only` these, where some are given.

    Raises `UserInputError` or `OSError` where it cannot be read.
    """
    tensors = _tensors_in(path)
    if not tensors:
        with FileIO(path) as file:
            return FileEntry(rest=hashlib.file_digest(file, "sha256").hexdigest(), tensors={})
    wanted = {name: each for name, each in tensors.items() if only is None or name in only}
    with TensorReader(path) as reader:
        digests = {name: _digest(reader, tensor) for name, tensor in wanted.items()}
        if only is None and path.suffix in TORCH:
            for storage in storages_beside(path, tensors):
                digests[storage.record] = _digest_of_storage(reader, storage)
    return entry_of_tensors(path, digests)


def entry_of_tensors(path: Path, digests: Mapping[str, int]) -> FileEntry:
    """That of a file whose tensors have these `digests`: reads what says where they lie, and
    nothing else. Raises as `entry_of` does."""
    if path.suffix in TORCH:
        return FileEntry(rest=rest_digest(path), tensors=digests)
    offsets = (tensor.offset for tensor in _tensors_in(path).values())
    header = bytearray(min(offsets, default=0))
    with TensorReader(path) as reader:
        reader.fill(memoryview(header), 0)
    return FileEntry(rest=hashlib.sha256(header).hexdigest(), tensors=digests)


def _tensors_in(path: Path) -> Mapping[str, StoredTensor]:
    """Those by which a file is known; none where it is known as a whole."""
    try:
        if path.suffix == SAFETENSORS:
            return {tensor.name: tensor for tensor in tensors_of(path)}
        return tensors_by_key(path) if path.suffix in TORCH and is_plain(path) else {}
    except UserInputError:  # its header is damaged, or has integers or code
        return {}


def model_files(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """All files below `folder`, through links too; one that leads back to `above` is not taken."""
    real = folder.resolve()
    if real in above:
        return
    for path in folder.iterdir():
        if path.name.startswith(_IGNORED):
            continue
        if path.is_dir():
            yield from model_files(path, (*above, real))
        elif path.is_file():
            yield path


def _digest(reader: TensorReader, tensor: StoredTensor) -> int:
    if tensor.stride is not None:
        return bit_digest(reader.read(tensor))
    pieces = _pieces(reader, tensor)
    return sum(bit_digest(rows, first_row=first_row) for first_row, rows in pieces) % MODULUS


def _digest_of_storage(reader: TensorReader, storage: Storage) -> int:
    """Of bytes of which nobody says which numbers they are."""
    digest, piece = hashlib.sha256(), memoryview(bytearray(_PIECE_BYTES))
    for start in range(0, storage.num_bytes, _PIECE_BYTES):
        part = piece[: storage.num_bytes - start]
        reader.fill(part, storage.offset + start)
        digest.update(part)
    return int.from_bytes(digest.digest()[:8], "little")


def _pieces(reader: TensorReader, tensor: StoredTensor) -> Iterator[tuple[int, Tensor]]:
    """Whole rows of `tensor` and the first one's number; each piece is overwritten by the next."""
    num_rows = tensor.shape[0] if tensor.shape else 1
    row_bytes = tensor.num_bytes // max(1, num_rows)
    at_a_time = max(1, _PIECE_BYTES // max(1, row_bytes))
    buffer = empty((min(num_rows, at_a_time), row_bytes), dtype=uint8)
    for first_row in range(0, num_rows, at_a_time):
        rows = buffer[: num_rows - first_row]
        reader.fill(rows.flatten().numpy().data, tensor.offset + first_row * row_bytes)
        yield first_row, rows.view(tensor.dtype)
