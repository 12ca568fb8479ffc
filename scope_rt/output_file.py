"""A file under its final name is always complete: it is written beside it and renamed at the end.

The partial file is hidden, keeps the suffix (encoders choose their format by it) and carries the
process id, so that two runs writing to one name cannot mix.
"""

import errno
import os
import stat
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
    _check_place(path)
    if path.suffix.lower() not in suffixes:
        raise UserInputError(
            f"output {path}: got suffix {path.suffix!r}, want one of {', '.join(suffixes)}; "
            "rename the output"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except IsADirectoryError as error:
        raise UserInputError(
            f"output {path}: {error.filename} is a folder where a file must go; remove it or "
            "choose another name"
        ) from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise _too_long(path) from error
        raise UserInputError(
            f"output {path}: cannot write to folder {path.parent} ({error.strerror}); "
            "choose a folder you may write to"
        ) from error


def _check_place(path: Path) -> None:
    """Refuse a path that is no text, or at which something else than a file is."""
    try:
        str(path.absolute()).encode()
        mode = path.stat().st_mode
    except UnicodeEncodeError:
        raise UserInputError(
            f"output {str(path)!a}: got a path that UTF-8 cannot hold; choose another name"
        ) from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise _too_long(path) from error
        return  # it is not there, or its folder says why it cannot be
    if stat.S_ISDIR(mode):
        raise UserInputError(f"output {path}: got a folder, want a file; choose another name")
    if not stat.S_ISREG(mode):
        raise UserInputError(
            f"output {path}: is there already and no ordinary file; choose another name"
        )


def _too_long(path: Path) -> UserInputError:
    return UserInputError(
        f"output {path}: the path is too long, or that of a hidden file beside it; choose a "
        "shorter one"
    )


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
