"""A safetensors file: what lies where in it. `safe_open` checks its header."""

import json
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError, safe_open

from scope_contracts.errors import UserInputError, shown
from scope_rt.tensor_files.stored_tensor import StoredTensor

DTYPES = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)
"""The names of the file format."""
_FLOATS = tuple(name for name, dtype in DTYPES.items() if dtype.is_floating_point)
_HEADER_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100 << 20
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def tensors_of(path: Path, *, wanted: Collection[str] = _FLOATS) -> Iterator[StoredTensor]:
    """The tensors of one file, in the order of their bytes: the format leaves no gap between.

    Args:
        wanted: dtypes, as the format calls them; any other is refused.

    Raises:
        UserInputError: the file cannot be read, or has a tensor of another dtype.
    """
    try:
        with path.open("rb") as raw, safe_open(path, "pt") as file:
            header_bytes = int.from_bytes(raw.read(_HEADER_LENGTH_BYTES), "little")
            offset = _HEADER_LENGTH_BYTES + header_bytes
            for name in file.offset_keys():
                header = file.get_slice(name)
                if header.get_dtype() not in wanted:
                    raise UserInputError(
                        f"{path}: weight {name} is {header.get_dtype()}, want one of "
                        f"{', '.join(wanted)}; copy the checkpoint's own file"
                    )
                tensor = StoredTensor(
                    path=path,
                    name=name,
                    offset=offset,
                    shape=tuple(header.get_shape()),
                    dtype=DTYPES[header.get_dtype()],
                )
                offset += tensor.num_bytes
                yield tensor
    except (SafetensorError, OSError) as error:
        if _is_lfs_pointer(path):
            raise UserInputError(
                f"{path} is a pointer of Git LFS, not the weights; fetch them with `git lfs pull`"
            ) from error
        beyond = _first_beyond_end(path)
        what = f"{error} ({beyond} ends beyond it)" if beyond else error
        raise UserInputError(f"cannot read {path}: {what}; copy the file again") from error


def _first_beyond_end(path: Path) -> str | None:
    """The first tensor of a broken file whose bytes would end after the file; None where its header
    tells none."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        size = path.stat().st_size
        with path.open("rb") as raw:
            num_bytes = int.from_bytes(raw.read(_HEADER_LENGTH_BYTES), "little")
            if num_bytes > min(size, _MOST_HEADER_BYTES):
                return None
            header = json.loads(raw.read(num_bytes))
        num_data = size - _HEADER_LENGTH_BYTES - num_bytes
        header.pop("__metadata__", None)
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            if entry["data_offsets"][1] > num_data:
                return shown(name)
    return None


def _is_lfs_pointer(path: Path) -> bool:
    """Whether a clone without Git LFS left its small text file in place of the weights."""
    with suppress(OSError), path.open("rb") as file:
        return file.read(len(_LFS_POINTER)) == _LFS_POINTER
    return False
