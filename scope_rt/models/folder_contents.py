"""The fingerprint of a model folder and the checksums of its weights come from one read of it.

Ranks compare fingerprints before they load, and each reads its own slices only: so one rank of a
machine reads the whole folder once (the others wait for it), and `content_cache` keeps what it
found. After that, as long as no file changes, a fingerprint costs one `stat` per file, and weights
are read by slice alone. So a machine reads a folder once more than its weights need, the first time
it sees it; and the files of the weights again for each new dtype of use.

Kept checksums are also what finds a disk that gives other bytes later than it did then: the shards
that ranks load no longer add up to them.
"""

import hashlib
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from scope_contracts.errors import UserInputError
from scope_rt.bit_digest import bit_digest
from scope_rt.models.content_cache import ContentCache, FileContent, Stamp
from scope_rt.models.file_contents import model_files, read_file
from scope_rt.models.weight_files import WeightFiles
from scope_rt.tensors import NAMES


class FolderContents:
    """What the files of one model folder hold, read when it is first asked for."""

    def __init__(self, folder: Path, weights: WeightFiles, *, cache: ContentCache | None) -> None:
        self._folder, self._weights, self._cache = folder, dict(weights.by_file()), cache
        self._known: dict[str, FileContent] = {}

    def fingerprint(self, dtype: torch.dtype | None = None) -> str:
        """SHA-256 over names and bytes of all files but hidden ones and the manifest.

        Args:
            dtype: of use, where `checksums` will be asked for too: then one read gives both.

        Raises:
            UserInputError: a file cannot be read.
        """
        digest = hashlib.sha256()
        for name, content in sorted(self._read(dtype).items()):
            digest.update(name.encode())
            digest.update(bytes.fromhex(content.sha256))
        return digest.hexdigest()

    def checksums(self, dtype: torch.dtype) -> dict[str, int]:
        """The checksum of every whole weight in the dtype of use, by its diffusers name.

        Raises:
            UserInputError: a file cannot be read.
        """
        return self._kept(dtype, _key(dtype))

    def stored_digests(self, dtype: torch.dtype) -> dict[str, int]:
        """As `checksums`, and by the same read; but in the files' own dtypes."""
        return self._kept(dtype, _key(None))

    def sha256s(self) -> dict[str, str]:
        """Of every file, by its name relative to the folder. Raises `UserInputError`."""
        return {name: content.sha256 for name, content in self._read(None).items()}

    def kept_sha256s(self) -> dict[str, str]:
        """Those that are known already, of files that nobody has written since; reads none."""
        if self._cache is not None:
            self._known = self._cache.load() | self._known
        return kept_sha256s(self._folder, self._known)

    def _kept(self, dtype: torch.dtype, key: str) -> dict[str, int]:
        contents = self._read(dtype)
        return {
            name: contents[self._name(path)].checksums[key][name]
            for path, tensors in self._weights.items()
            for name, _ in tensors
        }

    def _read(self, dtype: torch.dtype | None) -> Mapping[str, FileContent]:
        """What all files hold now; only files that changed, or lack checksums, are read."""
        try:
            paths = {*model_files(self._folder), *self._weights}
            stamps = {self._name(path): Stamp.of(path) for path in paths}
            if self._lacking(stamps, dtype) and self._cache is not None:
                self._known |= self._cache.load()
            if not self._lacking(stamps, dtype):
                return {name: self._known[name] for name in stamps}
            if self._cache is None:
                return self._read_lacking(stamps, dtype)
            with self._cache.lock():
                self._known |= self._cache.load()
                return self._read_lacking(stamps, dtype)
        except OSError as error:
            raise UserInputError(
                f"cannot read {error.filename or self._folder}: {error.strerror}; copy it again"
            ) from error

    def _lacking(self, stamps: Mapping[str, Stamp], dtype: torch.dtype | None) -> list[str]:
        """The files of which too little is known."""
        needed: dict[str, set[str]] = {}
        if dtype is not None:
            for path, tensors in self._weights.items():
                needed[self._name(path)] = {name for name, _ in tensors}
        lacking = []
        for name, stamp in stamps.items():
            known = self._known.get(name)
            if known is None or known.stamp != stamp:
                lacking.append(name)
            elif dtype is not None:
                keys = (_key(dtype), _key(None))
                sums = [known.checksums.get(key, {}).keys() for key in keys]
                lacking += [name] if needed.get(name, set()) - (sums[0] & sums[1]) else []
        return lacking

    def _read_lacking(
        self, stamps: Mapping[str, Stamp], dtype: torch.dtype | None
    ) -> Mapping[str, FileContent]:
        """Read what is lacking; what may change unnoticed is returned, but not remembered.

        Each file is kept at once, so that a start that ran out of time helps the next one.
        """
        contents = {name: self._known.get(name) for name in stamps}
        for name in self._lacking(stamps, dtype):
            now_ns = time.time_ns()  # a write from here on changes the stamp of a settled file
            content = self._read_file(self._folder / name, stamps[name], dtype)
            known = contents[name]
            if known is not None and (known.stamp, known.sha256) == (content.stamp, content.sha256):
                content = replace(content, checksums={**known.checksums, **content.checksums})
            contents[name] = content
            if content.stamp.is_settled(now_ns):
                self._known[name] = content
            self._known = {name: known for name, known in self._known.items() if name in stamps}
            if self._cache is not None:
                self._cache.save(self._known)
        return {name: content for name, content in contents.items() if content is not None}

    def _read_file(self, path: Path, stamp: Stamp, dtype: torch.dtype | None) -> FileContent:
        named = self._weights.get(path)
        if named is None or dtype is None:
            return FileContent(stamp=stamp, sha256=read_file(path).sha256, checksums={})
        read = read_file(path, [tensor for _, tensor in named], dtype)
        return FileContent(
            stamp=stamp,
            sha256=read.sha256,
            checksums={
                _key(None): {name: read.stored[tensor.name] for name, tensor in named},
                _key(dtype): {name: read.in_use[tensor.name] for name, tensor in named},
            },
        )

    def _name(self, path: Path) -> str:
        return path.relative_to(self._folder).as_posix()


def kept_sha256s(folder: Path, known: Mapping[str, FileContent]) -> dict[str, str]:
    """Of the files of `folder` that nobody has written since they were read."""
    kept = {}
    for name, content in known.items():
        with suppress(OSError):
            if Stamp.of(folder / name) == content.stamp:
                kept[name] = content.sha256
    return kept


@cache
def _key(dtype: torch.dtype | None) -> str:
    """Under which checksums in the dtype of use are kept, or in the files' own where that is None:
    those of another function are others."""
    return f"{'stored' if dtype is None else NAMES[dtype]} {bit_digest(torch.arange(9.0)):x}"
