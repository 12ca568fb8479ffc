"""The files of a snapshot: killed at any moment, the folder holds one whole state.

    state.N       the bytes of the N-th state
    DIGEST        the bytes of one tensor that a state names by their BLAKE2b-128

New tensors are written first, then a state under the next number, then what it does not name is
removed: the state before, and tensors. The newest state counts. It never takes the place of a file:
ext4 then waits until all of the new one is on its way to the disk. Nothing is forced to the disk:
after a power cut, unlike after a kill, a snapshot may be damaged.
"""

import errno
import os
import re
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from pathlib import Path

from scope_contracts.log_file import refuse_special

DIGEST_BYTES = 16
_STATE = re.compile(r"state(?:\.(\d+))?")
"""Earlier versions had no numbers."""
_OURS = re.compile(rf"(?:[0-9a-f]{{{2 * DIGEST_BYTES}}}|{_STATE.pattern})(?:\.partial)?")
_MOST_READS = 100
"""Of a state that a living writer takes away each time before it is opened."""


class SnapshotFolder:
    """The folder of one stream; it need not exist before a write. All here raises `OSError`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(
        self,
        state: bytes,
        tensors: Mapping[str, Callable[[], bytes]],
        *,
        is_wanted: Callable[[], bool],
    ) -> None:
        """Replace what is there. `tensors` are all that the state names: each is made only where
        its file is not there. Once `is_wanted` says no, nothing changes any more."""
        try:
            there = frozenset(os.listdir(self.path))
        except FileNotFoundError:
            self.path.mkdir(parents=True, exist_ok=True)
            there = frozenset()
        for digest, content in tensors.items():
            # Whoever tidies old files away must not leave a state that names what is gone.
            if digest not in there:
                self._add(digest, content(), there, is_wanted)
        name = f"state.{max(map(_number, there), default=0) + 1}"
        self._add(name, state, there, is_wanted)
        if is_wanted():
            self._remove(name for name in there - tensors.keys() if _OURS.fullmatch(name))

    def clear(self, *, is_wanted: Callable[[], bool]) -> None:
        """Remove the snapshot, its states first: there is nothing to resume. Foreign files stay.
        Once `is_wanted` says no, nothing more is removed."""
        states = self._states()  # the newest last: an older one must never count
        others = set(os.listdir(self.path) if self.path.is_dir() else ()) - set(states)
        for name in (*states, *others):
            if _OURS.fullmatch(name) and is_wanted():
                self._remove([name])
        if is_wanted() and self.path.is_dir() and not any(self.path.iterdir()):
            self.path.rmdir()

    def tensor(self, digest: str) -> bytes:
        """The bytes of a tensor's file."""
        path = self.path / digest
        refuse_special(path)
        return path.read_bytes()

    def newest(self) -> tuple[str, bytes]:
        """Name and bytes of the newest state, empty where there is none."""
        for _ in range(_MOST_READS):
            *_, name = ["", *self._states()]
            if not name:
                return "", b""
            path = self.path / name
            with suppress(FileNotFoundError):
                refuse_special(path)  # opening a pipe waits for who writes to it
                return name, path.read_bytes()
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path / name))

    def _add(
        self, name: str, content: bytes, there: Set[str], is_wanted: Callable[[], bool]
    ) -> None:
        """Write a file and then give it its name."""
        if not is_wanted():
            return
        path = f"{self.path}/{name}"
        partial_path = f"{path}.partial"
        if f"{name}.partial" in there:  # a killed process left it
            os.unlink(partial_path)
        # A new file: a write that stalled may still come, into the one it opened.
        file = os.open(partial_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        left, is_named = memoryview(content), False
        try:
            try:
                while left:
                    left = left[os.write(file, left) :]
            finally:
                os.close(file)
            if is_wanted():
                os.replace(partial_path, path)
                is_named = True
        finally:
            if not is_named:
                self._remove([f"{name}.partial"])

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(f"{self.path}/{name}")

    def _states(self) -> list[str]:
        """The names of the states that are there, the newest last."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        return sorted(filter(_STATE.fullmatch, names), key=_number)


def _number(name: str) -> int:
    """Of a state, by its name; 0 for other files."""
    found = _STATE.fullmatch(name)
    return int(found[1] or 0) if found else 0
