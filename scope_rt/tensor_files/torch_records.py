"""Every byte of a file of torch.save is in one of its records: a storage, or what says what lies in
them."""

import hashlib
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from zipfile import BadZipFile, ZipFile, ZipInfo

from torch import Tensor

from scope_contracts.errors import UserInputError
from scope_rt.tensor_files.stored_tensor import StoredTensor
from scope_rt.tensor_files.torch_file import TorchFile

_STORAGE = re.compile(r"[^/]+/data/\d+")
_LOCAL_HEADER = struct.Struct("<26xHH")
"""Ends with the lengths of the name and of what is added to it; behind them the record begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Numbers that lie in a file as they are."""

    record: str
    offset: int
    num_bytes: int


def tensors_by_key(path: Path) -> dict[str, StoredTensor]:
    """The tensors of all state dicts of a file by `key/name`, or `name` where it is one itself; no
    recipe has a part in that.

    Raises:
        UserInputError: it cannot be read, or has code in it.
    """
    return dict(_named(TorchFile.open(path)))


def storages_beside(path: Path, tensors: Mapping[str, StoredTensor]) -> list[Storage]:
    """Those of which more is stored than one of these `tensors`, as an optimizer's are.

    Raises `UserInputError`.
    """
    whole = {(each.offset, each.num_bytes) for each in tensors.values() if each.stride is None}
    return [each for each in _storages(path) if (each.offset, each.num_bytes) not in whole]


def rest_digest(path: Path) -> str:
    """SHA-256 over all that is in no storage, and over where each storage lies. Reads no storage.

    Raises `UserInputError`.
    """
    digest = hashlib.sha256()
    with _records(path) as records:
        for each in records.infolist():
            place = (each.filename, each.header_offset, each.file_size, each.CRC)
            digest.update(f"{place}\n".encode())
            if not _STORAGE.fullmatch(each.filename):
                digest.update(records.read(each))
    return digest.hexdigest()


def _named(file: TorchFile) -> Iterator[tuple[str, StoredTensor]]:
    for key, value in file.content.items():
        inside = value.items() if isinstance(value, Mapping) else [("", value)]
        for name, tensor in inside:
            if isinstance(tensor, Tensor) and tensor.is_meta and tensor.is_floating_point():
                yield f"{key}/{name}" if name else str(key), file.stored(str(name), tensor)


def _storages(path: Path) -> list[Storage]:
    with _records(path) as records, path.open("rb") as file:
        return [
            Storage(record=each.filename, offset=_first_byte(file, each), num_bytes=each.file_size)
            for each in records.infolist()
            if _STORAGE.fullmatch(each.filename)
        ]


def _first_byte(file: BinaryIO, record: ZipInfo) -> int:
    file.seek(record.header_offset)
    len_name, len_more = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    return int(record.header_offset + _LOCAL_HEADER.size + len_name + len_more)


def _records(path: Path) -> ZipFile:
    try:
        return ZipFile(path)
    except (BadZipFile, OSError) as error:
        raise UserInputError(f"cannot read {path}: {error}; copy the file again") from error
