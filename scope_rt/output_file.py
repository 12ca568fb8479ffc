"""A file under its final name is always complete: it is written beside it and renamed at the end.

The partial file is hidden, keeps the suffix (encoders choose their format by it) and carries the
process id, so that two runs writing to one name cannot mix.
"""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from scope_contracts.errors import UserInputError


def claim(path: Path, *, suffixes: Collection[str]) -> Path:
    """Create the empty partial file of `path` and return its path.

    Raises what `creating_beside` raises; then no file is left.
    """
    partial = path.with_name(f".{path.stem}.{os.getpid()}.partial{path.suffix.lower()}")
    with creating_beside(path, suffixes=suffixes):
        partial.touch()
    return partial


@contextmanager
def creating_beside(path: Path, *, suffixes: Collection[str]) -> Iterator[None]:
    """Around the lines that create the first file of an output; missing folders are created.

    Raises `UserInputError` where `path` could not become a file with one of the `suffixes`, or the
    block could not create its file.
    """
    if path.is_dir():
        raise UserInputError(f"output {path}: got a folder, want a file; choose another name")
    if path.suffix.lower() not in suffixes:
        raise UserInputError(
            f"output {path}: got suffix {path.suffix!r}, want one of {', '.join(suffixes)}; "
            "rename the output"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserInputError(
            f"output {path}: cannot write to folder {path.parent} ({error.strerror}); "
            "choose a folder you may write to"
        ) from error


@contextmanager
def replacing(path: Path, *, suffixes: Collection[str]) -> Iterator[Path]:
    """Yield the partial path to write; `path` appears when the block ends, or not at all.

    Raises what `claim` raises.
    """
    partial = claim(path, suffixes=suffixes)
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
