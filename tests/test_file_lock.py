"""One living writer a file, also where its last owner removes it at this very moment."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from scope_rt import file_lock
from scope_rt.file_lock import open_locked


def test_a_file_is_locked_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    file = open_locked(path)
    for _ in range(2):
        with pytest.raises(BlockingIOError):
            open_locked(path)
    os.close(file)
    os.close(open_locked(path))


def test_a_file_that_must_exist_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_locked(tmp_path / "a", must_exist=True)
    assert list(tmp_path.iterdir()) == []


def _replace(path: Path) -> None:
    path.unlink()
    path.touch()


@pytest.mark.parametrize("lose", [Path.unlink, _replace])
def test_what_is_locked_is_the_file_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lose: Callable[[Path], None]
) -> None:
    path, num_locked = tmp_path / "a", 0

    def lock(file: int, operation: int) -> None:
        nonlocal num_locked
        num_locked += 1
        fcntl.flock(file, operation)
        if num_locked == 1:
            lose(path)

    with monkeypatch.context() as patch:
        patch.setattr(file_lock, "fcntl", Locks(lock))
        file = open_locked(path)
    assert (num_locked, os.fstat(file).st_ino) == (2, path.stat().st_ino)
    with pytest.raises(BlockingIOError):
        open_locked(path)
    os.close(file)


class Locks:
    """In the place of the module."""

    LOCK_EX, LOCK_NB = fcntl.LOCK_EX, fcntl.LOCK_NB

    def __init__(self, flock: Callable[[int, int], None]) -> None:
        self.flock = flock
