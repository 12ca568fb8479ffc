"""A model folder's manifest says what every byte of it was when somebody vouched for it.

`scope_manifest.json` has the digest of every file of the folder, and of one of tensors that of
every tensor in the file's own dtype (`file_contents`). It is no part of the model: the
fingerprint leaves it out.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from scope_contracts.errors import ModelDamageError, UserInputError
from scope_rt import output_file
from scope_rt.models.file_contents import MANIFEST_NAME, FileEntry, entry_of, model_files

_VERSION = 3
_WEIGHTS = ".safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A file, or a tensor in it, that is not what a manifest says."""

    file: str
    tensor: str | None
    what: str

    def __str__(self) -> str:
        where = self.file if self.tensor is None else f"{self.file}: tensor {self.tensor}"
        return f"{where} {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What is known of a folder's files, by their names relative to it."""

    files: Mapping[str, FileEntry]

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Read every byte of `folder`.

        Raises:
            UserInputError: a file cannot be read.
        """
        try:
            names = sorted(path.relative_to(folder).as_posix() for path in model_files(folder))
            return cls(files={name: entry_of(folder / name) for name in names})
        except OSError as error:
            raise UserInputError(
                f"cannot read {error.filename or folder}: {error.strerror}; copy it again"
            ) from error

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The manifest that lies in `folder`; None where there is none.

        Raises:
            UserInputError: it cannot be read, is damaged or of another version.
        """
        path = folder / MANIFEST_NAME
        try:
            plain = json.loads(path.read_bytes())
            if plain["version"] != _VERSION or plain["checksum"] != _checksum(plain["files"]):
                raise ValueError("its version or its checksum is another")
            return cls(
                files={
                    name: FileEntry(
                        rest=entry["rest"],
                        tensors={key: int(digest, 16) for key, digest in entry["tensors"].items()},
                    )
                    for name, entry in plain["files"].items()
                }
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserInputError(
                f"cannot use {path} ({error}); copy it again, or make it anew with scope-rt model "
                f"verify {folder} --write"
            ) from error

    def write(self, folder: Path) -> Path:
        """Put it into `folder`, whole or not at all; returns its path. Raises `UserInputError`."""
        files = {
            name: {
                "rest": entry.rest,
                "tensors": {key: f"{digest:016x}" for key, digest in entry.tensors.items()},
            }
            for name, entry in self.files.items()
        }
        plain = {"version": _VERSION, "checksum": _checksum(files), "files": files}
        path = folder / MANIFEST_NAME
        with output_file.replacing(path, suffixes=(".json",)) as partial:
            partial.write_text(json.dumps(plain, indent=1) + "\n")
        return path

    def differences(self, found: "Manifest") -> Iterator[Difference]:
        """What of `found` is not as it says, by the tensors that both know; other files than
        weights may have been added."""
        for name, want in self.files.items():
            got = found.files.get(name)
            if got is None:
                yield Difference(file=name, tensor=None, what="is gone")
            elif got.only(want.tensors).digest != want.only(got.tensors).digest:
                yield from _in_file(name, want, got)
        for name in found.files.keys() - self.files.keys():
            if name.endswith(_WEIGHTS):
                yield Difference(file=name, tensor=None, what="was added")

    def check(self, folder: Path, found: Mapping[str, FileEntry]) -> None:
        """Compare with what was found in `folder`; files that are not given are not compared.

        Raises:
            ModelDamageError: naming the tensor or the file that is another.
        """
        known = Manifest(files={name: self.files[name] for name in found if name in self.files})
        for difference in known.differences(Manifest(files=found)):
            raise refusal(folder, difference)


def refusal(folder: Path, difference: Difference) -> ModelDamageError:
    """The error for a folder that holds something else than it should."""
    return ModelDamageError(
        f"model folder {folder}: {difference}; copy the folder again, or if that was changed on "
        f"purpose, vouch for it with scope-rt model verify {folder} --write"
    )


def _in_file(name: str, want: FileEntry, got: FileEntry) -> Iterator[Difference]:
    what = "is not what it was"
    others = [
        tensor
        for tensor in sorted(want.tensors.keys() & got.tensors.keys())
        if got.tensors[tensor] != want.tensors[tensor]
    ]
    for tensor in others:
        yield Difference(file=name, tensor=tensor, what=what)
    if not others:
        yield Difference(file=name, tensor=None, what=what)


def _checksum(files: object) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
