"""`scope-rt verify`: whether the files of a stream hold what was written into them.

A summary names what was written beside it, with a digest of each file and one of itself; a
recording has checksums of its own.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scope_contracts.errors import DamageError, UserInputError
from scope_rt.file_digest import FileDigest, digest_of
from scope_rt.video.segments import CODEC_OF_SUFFIX
from scope_runners.recording_argument import read_recording
from scope_runners.wording import printable

CHECKSUM = "checksum"
"""The key under which a summary has the digest of all its other keys."""
_RECORDING = "recording"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileVerdict:
    """What was found of one file; `damage` is empty where it is as it was written."""

    kind: str
    path: str
    damage: str


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `scope-rt verify`."""
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="a video, its summary (.json), or a recording"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run_verify(namespace: argparse.Namespace) -> int:
    """Compare, and print a row a file.

    Raises:
        UserInputError: `file` is nothing that can be compared.
        DamageError: a file holds something else; its first one is named.
    """
    path: Path = namespace.file
    if path.suffix.lower() in {*CODEC_OF_SUFFIX, ".json"}:
        verdicts = _of_summary(path.with_suffix(".json"))
    else:
        verdicts = [_of_recording(path)]
    if namespace.json:
        print(json.dumps([asdict(verdict) for verdict in verdicts], indent=2), flush=True)
    else:
        for verdict in verdicts:
            what = "DAMAGED" if verdict.damage else "as written"
            print(printable(f"{verdict.kind:<14} {what:<12} {verdict.path}"), flush=True)
            if verdict.damage:
                print(printable(f"{'':<14} {verdict.damage}"), flush=True)
    for verdict in verdicts:
        if verdict.damage and verdict.kind == _RECORDING:
            raise DamageError(verdict.damage)  # which names the file, and what to do
        if verdict.damage:
            raise DamageError(
                f"{verdict.kind} {verdict.path} is not what was written ({verdict.damage}); copy "
                "it again from where it was written, or make it anew"
            )
    return 0


def sealed(plain: Mapping[str, Any]) -> dict[str, Any]:
    """`plain` with the digest of all it holds."""
    return {**plain, CHECKSUM: digest_of(json.dumps(plain).encode())}


def check_written(path: Path, written: FileDigest) -> str:
    """How the file at `path` differs from what was written; empty where it does not."""
    try:
        found = FileDigest.of(path)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if found.num_bytes != written.num_bytes:
        return f"{found.num_bytes} bytes, {written.num_bytes} were written"
    if found != written:
        return f"its digest is {found.blake2b}, written was {written.blake2b}"
    return ""


def _of_recording(path: Path) -> FileVerdict:
    try:
        damage = read_recording(path).damage
    except UserInputError as error:
        raise UserInputError(
            f"{error}, or a video or its summary, which names all beside it"
        ) from error
    return FileVerdict(kind=_RECORDING, path=str(path), damage=str(damage or ""))


def _of_summary(path: Path) -> list[FileVerdict]:
    try:
        plain = json.loads(path.read_bytes())
        checksum = plain.pop(CHECKSUM)
        files = {
            str(kind): (str(plain["files"][kind]), FileDigest(**digest))
            for kind, digest in plain["digests"].items()
        }
    except OSError as error:
        raise UserInputError(
            f"cannot read the summary {path} ({error.strerror}); it is written beside a video"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserInputError(
            f"{path} is no summary of this version, or is damaged; give what scope-rt stream wrote"
        ) from error
    damage = "" if checksum == sealed(plain)[CHECKSUM] else "its checksum is another"
    verdicts = [FileVerdict(kind="summary", path=str(path), damage=damage)]
    for kind, (named, written) in files.items():
        # A person may have moved all of them; the summary's own folder counts first.
        beside = path.with_name(Path(named).name)
        there = beside if beside.exists() else Path(named)
        verdicts.append(
            FileVerdict(kind=kind, path=str(there), damage=check_written(there, written))
        )
    return verdicts
