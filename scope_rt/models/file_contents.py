"""One read of a file gives all that is compared of it: its SHA-256, its tensors' digests."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from scope_rt.bit_digest import MODULUS, bit_digest
from scope_rt.tensor_files.stored_tensor import StoredTensor, TensorReader

MANIFEST_NAME = "scope_manifest.json"
_PIECE_BYTES = 4 << 20
_IGNORED = (".", "__pycache__", MANIFEST_NAME)
"""Beginnings of names that are no part of a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRead:
    """What was read; digests by the names in the file, `in_use` those in the dtype of use."""

    sha256: str
    stored: dict[str, int]
    in_use: dict[str, int]


def read_file(
    path: Path, tensors: Sequence[StoredTensor] = (), dtype: torch.dtype | None = None
) -> FileRead:
    """Read all of `path`, whose `tensors` are given in the order of their bytes.

    Raises `UserInputError` or `OSError` where it cannot be read.
    """
    if not tensors:
        with FileIO(path) as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return FileRead(sha256=sha256, stored={}, in_use={})
    digest = hashlib.sha256()
    stored, in_use = dict[str, int](), dict[str, int]()
    with TensorReader(path) as reader:
        header = bytearray(tensors[0].offset)
        reader.fill(memoryview(header), 0)
        digest.update(header)
        for tensor in tensors:
            whole = used = 0
            for first_row, rows in _pieces(reader, tensor):
                digest.update(rows.view(torch.uint8).numpy().data)
                part = bit_digest(rows, first_row=first_row)
                whole += part
                if dtype is not None and dtype is not tensor.dtype:
                    part = bit_digest(rows.to(dtype), first_row=first_row)
                used += part
            stored[tensor.name], in_use[tensor.name] = whole % MODULUS, used % MODULUS
    return FileRead(sha256=digest.hexdigest(), stored=stored, in_use=in_use)


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


def _pieces(reader: TensorReader, tensor: StoredTensor) -> Iterator[tuple[int, Tensor]]:
    """Whole rows of `tensor` and the first one's number; each piece is overwritten by the next."""
    num_rows = tensor.shape[0] if tensor.shape else 1
    row_bytes = tensor.num_bytes // max(1, num_rows)
    at_a_time = max(1, _PIECE_BYTES // max(1, row_bytes))
    buffer = torch.empty((min(num_rows, at_a_time), row_bytes), dtype=torch.uint8)
    for first_row in range(0, num_rows, at_a_time):
        rows = buffer[: num_rows - first_row]
        reader.fill(rows.flatten().numpy().data, tensor.offset + first_row * row_bytes)
        yield first_row, rows.view(tensor.dtype)
