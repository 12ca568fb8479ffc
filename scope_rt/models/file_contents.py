"""What the files of a model hold. Those of tensors are known by each tensor, so that what ranks
read of them, slice by slice, adds up to it: nobody has to read a file for its digest alone."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from torch import Tensor, empty, uint8

from scope_contracts.errors import UserInputError
from scope_rt.bit_digest import MODULUS, bit_digest
from scope_rt.tensor_files.safetensors_file import tensors_of
from scope_rt.tensor_files.state_dict import SAFETENSORS
from scope_rt.tensor_files.stored_tensor import StoredTensor, TensorReader

MANIFEST_NAME = "scope_manifest.json"
_PIECE_BYTES = 4 << 20
_IGNORED = (".", "__pycache__", MANIFEST_NAME)
"""Beginnings of names that are no part of a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file."""

    digest: str
    """SHA-256 of the file; of a file of tensors, of its header and of `tensors`."""
    tensors: Mapping[str, int]
    """`bit_digest` of each, in the file's own dtype, by the names in the file."""


def entry_of(path: Path) -> FileEntry:
    """Read all of `path`. Raises `UserInputError` or `OSError` where it cannot be read."""
    tensors = tensors_in(path)
    if not tensors:
        with FileIO(path) as file:
            return FileEntry(digest=hashlib.file_digest(file, "sha256").hexdigest(), tensors={})
    with TensorReader(path) as reader:
        digests = {tensor.name: _digest(reader, tensor) for tensor in tensors}
    return entry_of_tensors(path, digests)


def entry_of_tensors(path: Path, digests: Mapping[str, int]) -> FileEntry:
    """That of a file whose tensors have these `digests`: its header is read, and nothing else.

    Raises as `entry_of` does.
    """
    header = bytearray(min((tensor.offset for tensor in tensors_in(path)), default=0))
    with TensorReader(path) as reader:
        reader.fill(memoryview(header), 0)
    whole = hashlib.sha256(header)
    for name, digest in sorted(digests.items()):
        whole.update(f"{name} {digest:016x}\n".encode())
    return FileEntry(digest=whole.hexdigest(), tensors=digests)


def tensors_in(path: Path) -> Sequence[StoredTensor]:
    """Those by which a file is known; none where it is known as a whole."""
    if not is_known_by_tensors(path):
        return ()
    try:
        return tuple(tensors_of(path))
    except UserInputError:  # its header is damaged, or has integers
        return ()


def is_known_by_tensors(path: Path) -> bool:
    """Whether a file's tensors, read slice by slice, say what it holds; a .pt may hold more."""
    return path.suffix == SAFETENSORS


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
    pieces = _pieces(reader, tensor)
    return sum(bit_digest(rows, first_row=first_row) for first_row, rows in pieces) % MODULUS


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
