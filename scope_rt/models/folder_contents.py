"""The files of a model folder are known by what is read of them anyway, and stay known.

Ranks that load the weights digest their slices as they read them; together these are the digests of
whole tensors (`learn`). A folder's manifest says them before anybody reads. What is known neither
way is read (`entries`), by one process of a machine while the others wait. `content_cache` keeps
all of it as long as no file changes: then a fingerprint costs one `stat` per file.

Kept digests are also what finds a disk that gives other bytes later than it did then: the slices
that ranks load no longer add up to them. Of a folder without a manifest the first load is what all
later ones are held against. A .pt may hold more than a model; it is known by what is read of it.
"""

import hashlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from scope_contracts.errors import UserInputError
from scope_rt.models.content_cache import ContentCache, FileContent, Stamp, boot_id
from scope_rt.models.file_contents import (
    FileEntry,
    entry_of,
    entry_of_tensors,
    model_files,
)


class FolderContents:
    """What the files of one model folder hold, read when it is first asked for."""

    def __init__(
        self,
        folder: Path,
        *,
        vouched: Mapping[str, FileEntry],
        cache: ContentCache | None,
        files: Callable[[], Iterable[Path]] | None = None,
        at_open: Mapping[str, Stamp] = MappingProxyType({}),
        loaded: Mapping[str, Collection[str]] = MappingProxyType({}),
    ) -> None:
        """`vouched` are the files of a manifest: tensors of theirs are not read here. `files` gives
        those that count; all of `folder` by default. `at_open` are the stamps from before anything
        was read (`stamps_of`). `loaded` has, by file, the tensors that ranks load, where no others
        of it count."""
        self._folder, self._cache = folder, cache
        self._files = files or partial(model_files, folder)
        self._vouched = {name: entry for name, entry in vouched.items() if entry.tensors}
        self._at_open, self._loaded = at_open, loaded
        self._known: dict[str, FileContent] = {}
        self._at_start: Mapping[str, Stamp] = {}
        self._started_ns = 0

    def entries(self) -> dict[str, FileEntry]:
        """What all files hold, but hidden ones and the manifest; reads what is not known.

        Raises:
            UserInputError: a file cannot be read.
        """
        with _readable(self._folder):
            stamps = self._stamps()
            if self._lacking(stamps) and self._cache is not None:
                with self._cache.lock():
                    self._recall(self._cache)
                    read = self._read_lacking(stamps)
            else:
                read = self._read_lacking(stamps)
            known = {name: content.entry for name, content in self._known.items()}
            found = known | self._vouched_now(stamps) | read
            return {name: self._counting(name, found[name]) for name in stamps}

    def _counting(self, name: str, entry: FileEntry) -> FileEntry:
        """What counts of a file."""
        return entry.only(self._loaded[name]) if name in self._loaded else entry

    def tensors_known(self, files: Iterable[str]) -> dict[str, Mapping[str, int]] | None:
        """The digests of the tensors of each of these files; None where they are not known of one.
        Reads no tensor."""
        kept, known = self.kept(), {}
        for name in files:
            entry = self._vouched.get(name) or kept.get(name)
            if entry is None:
                return None
            known[name] = entry.tensors
        return known

    def place(self) -> str:
        """Where the files lie, and their times: equal for ranks that read the very same ones.

        What is learned afterwards counts only if nobody has written them in between. Raises
        `UserInputError`.
        """
        with _readable(self._folder):
            self._started_ns, self._at_start = time.time_ns(), self._stamps()
            place = hashlib.sha256(boot_id().encode())
            for name, stamp in sorted(self._at_start.items()):
                device = (self._folder / name).stat().st_dev
                place.update(f"{name} {device} {stamp}\n".encode())
            return place.hexdigest()

    def learn(self, tensors: Mapping[str, Mapping[str, int]], *, keep: bool) -> None:
        """All ranks together have read these digests of whole files since `place`.

        Args:
            keep: whether this process is the one that keeps them for later ones.
        """
        with _readable(self._folder):
            for name, digests in tensors.items():
                stamp = Stamp.of(self._folder / name)
                if stamp == self._at_start.get(name) and stamp.is_settled(self._started_ns):
                    self._keep(name, stamp, entry_of_tensors(self._folder / name, digests))
            if keep and self._cache is not None:
                with self._cache.lock():
                    self._recall(self._cache)
                    self._cache.save(self._known)

    def check_unwritten(self, names: Iterable[str]) -> None:
        """What was read of these files so far is all of one state of them.

        Raises:
            UserInputError: one was written or replaced since the folder was opened; reads none.
        """
        with _readable(self._folder):
            for name in names:
                if name in self._at_open and Stamp.of(self._folder / name) != self._at_open[name]:
                    raise UserInputError(
                        f"{self._folder / name} was written while it was read, so what was read "
                        "may be of two files; start again once it is whole"
                    )

    def read_again(self, names: Iterable[str]) -> dict[str, FileEntry]:
        """Read these files whole, whatever is known of them; keeps what was not.

        Raises `OSError` or `UserInputError`.
        """
        kept, read = self.kept(), {}
        for name in names:
            now_ns, stamp = time.time_ns(), Stamp.of(self._folder / name)
            entry = read[name] = entry_of(self._folder / name)
            if name not in kept and stamp.is_settled(now_ns):
                self._keep(name, stamp, entry)
        return read

    def kept(self) -> dict[str, FileEntry]:
        """What is known already, of files that nobody has written since; reads none."""
        if self._cache is not None:
            self._recall(self._cache)
        return kept_entries(self._folder, self._known)

    def _recall(self, cache: ContentCache) -> None:
        """What any process has kept, beside what this one knows."""
        for name, content in cache.load().items():
            own = self._known.setdefault(name, content)
            if own.stamp == content.stamp:
                self._known[name] = replace(own, entry=own.entry.joined(content.entry))

    def _keep(self, name: str, stamp: Stamp, entry: FileEntry) -> None:
        """Beside what is known of the same file by other tensors: another recipe may take those."""
        before = self._known.get(name)
        if before is not None and before.stamp == stamp:
            entry = entry.joined(before.entry)
        self._known[name] = FileContent(stamp=stamp, entry=entry)

    def _stamps(self) -> dict[str, Stamp]:
        return _stamps_of(self._folder, self._files())

    def _lacking(self, stamps: Mapping[str, Stamp]) -> list[str]:
        """The files that must be read."""
        return [
            name
            for name, stamp in stamps.items()
            if name not in self._vouched and not self._is_known(name, stamp)
        ]

    def _is_known(self, name: str, stamp: Stamp) -> bool:
        known = self._known.get(name)
        if known is None or known.stamp != stamp:
            return False
        return known.entry.tensors.keys() >= set(self._loaded.get(name, ()))

    def _vouched_now(self, stamps: Mapping[str, Stamp]) -> dict[str, FileEntry]:
        """Their headers are read; whoever loads the tensors finds whether they are those."""
        return {
            name: entry_of_tensors(self._folder / name, entry.tensors)
            for name, entry in self._vouched.items()
            if name in stamps
        }

    def _read_lacking(self, stamps: Mapping[str, Stamp]) -> dict[str, FileEntry]:
        """Read what is lacking; what may change unnoticed is returned, but not remembered.

        Each file is kept at once, so that a start that ran out of time helps the next one.
        """
        read = {}
        for name in self._lacking(stamps):
            now_ns = time.time_ns()  # a write from here on changes the stamp of a settled file
            read[name] = self._read_file(self._folder / name)
            if stamps[name].is_settled(now_ns):
                self._keep(name, stamps[name], read[name])
            self._known = {name: known for name, known in self._known.items() if name in stamps}
            if self._cache is not None:
                self._cache.save(self._known)
        return read

    def _read_file(self, path: Path) -> FileEntry:
        return entry_of(path, self._loaded.get(path.relative_to(self._folder).as_posix()))


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserInputError(
            f"cannot read {error.filename or folder}: {error.strerror}; copy it again"
        ) from error


def stamps_of(folder: Path) -> dict[str, Stamp]:
    """Of all files below `folder`, before anything is read of them. Raises `UserInputError`."""
    with _readable(folder):
        return _stamps_of(folder, model_files(folder))


def _stamps_of(folder: Path, files: Iterable[Path]) -> dict[str, Stamp]:
    return {path.relative_to(folder).as_posix(): Stamp.of(path) for path in files}


def kept_entries(folder: Path, known: Mapping[str, FileContent]) -> dict[str, FileEntry]:
    """Of the files of `folder` that nobody has written since they were read."""
    kept = {}
    for name, content in known.items():
        with suppress(OSError):
            if Stamp.of(folder / name) == content.stamp:
                kept[name] = content.entry
    return kept


def fingerprint_of(entries: Mapping[str, FileEntry]) -> str:
    """SHA-256 over names and digests of all files."""
    digest = hashlib.sha256()
    for name, entry in sorted(entries.items()):
        digest.update(name.encode())
        digest.update(bytes.fromhex(entry.digest))
    return digest.hexdigest()
