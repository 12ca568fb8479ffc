"""What a model folder holds is read once, and kept beside the sizes and times of its files.

The cache is one JSON file per model folder in `$XDG_CACHE_HOME/scope-rt` (`~/.cache/scope-rt`). It
may be deleted at any time. What is there counts only if it is whole (it carries its own checksum);
a folder that cannot be written is as good as none.
"""

import fcntl
import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import torch

from scope_rt.bit_digest import bit_digest
from scope_rt.models.file_contents import FileEntry

VERSION = 3
LOCK_WAIT_S = 240.0
"""How long a rank waits for another that reads the same folder; then it reads too."""
LOCK_WARNING_S = 10.0
_LOCK_POLL_S = 0.02
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LOG = logging.getLogger(__name__)
_SETTLED_NS = 100_000_000
"""A file that was written less than this ago may be written again within one tick of its clock,
which no time would show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """What changes when a file is written; times are nanoseconds since the epoch.

    The time of the last change of the inode (`ctime`) is there because a copy may set the other.
    """

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> Self:
        """The file's, or of the file it links to. Raises `OSError`."""
        stat = path.stat()
        return cls(
            size=stat.st_size,
            mtime_ns=stat.st_mtime_ns,
            ctime_ns=stat.st_ctime_ns,
            inode=stat.st_ino,
        )

    def is_settled(self, now_ns: int) -> bool:
        """Whether a later write is sure to change the stamp."""
        return max(self.mtime_ns, self.ctime_ns) + _SETTLED_NS < now_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class FileContent:
    """What was read of a file while it had that stamp."""

    stamp: Stamp
    entry: FileEntry


class ContentCache:
    """The entries of one model folder, by file name relative to it; shared by all processes."""

    def __init__(self, root: Path, folder: Path) -> None:
        key = f"{folder.resolve()} {folder.stat().st_ino}"
        self._path = root / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"

    @classmethod
    def of(cls, folder: Path) -> Self | None:
        """Where this user's entries of `folder` are kept; None without a home."""
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if not base.is_absolute():
            try:
                base = Path.home() / ".cache"
            except RuntimeError:
                return None
        return cls(base / "scope-rt", folder)

    def load(self) -> dict[str, FileContent]:
        """The entries, or none where they cannot be read or are not what `save` wrote."""
        try:
            raw = json.loads(self._path.read_bytes())
            if raw["version"] != _version() or raw["checksum"] != _checksum(raw["files"]):
                return {}
            return {
                name: FileContent(
                    stamp=Stamp(**content["stamp"]), entry=FileEntry(**content["entry"])
                )
                for name, content in raw["files"].items()
            }
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
            return {}

    def save(self, entries: Mapping[str, FileContent]) -> None:
        """Replace the entries, if the folder can be written."""
        files = {name: asdict(entry) for name, entry in entries.items()}
        raw = {"version": _version(), "checksum": _checksum(files), "files": files}
        partial = self._path.with_suffix(f".{os.getpid()}.partial")
        with suppress(OSError):
            try:
                partial.write_text(json.dumps(raw))
                partial.replace(self._path)
            finally:
                partial.unlink(missing_ok=True)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Only one process of a machine is here at a time, so that only one reads the folder.

        Blocks up to `LOCK_WAIT_S`. Without a lock file to be had it is as if there were no other.
        """
        descriptor = None
        try:
            with suppress(OSError):
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                descriptor = os.open(self._path.with_suffix(".lock"), flags, 0o600)
                self._wait_for(descriptor)
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _wait_for(self, descriptor: int) -> None:
        start_s, is_told = time.monotonic(), False
        while (waited_s := time.monotonic() - start_s) < LOCK_WAIT_S:
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_LOCK_POLL_S)
            if waited_s > LOCK_WARNING_S and not is_told:
                is_told = True
                _LOG.warning(
                    "waiting up to %.0f s for another process that reads this model folder; a "
                    "stopped one holds %s",
                    LOCK_WAIT_S,
                    self._path.with_suffix(".lock"),
                )


def boot_id() -> str:
    """The same for all processes of this host since it was started."""
    with suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return platform.node()


def _version() -> str:
    """Digests of another function are others."""
    return f"{VERSION} {bit_digest(torch.arange(9.0)):x}"


def _checksum(files: object) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
