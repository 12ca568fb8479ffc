"""`scope-rt model`: what a model folder is, and whether it holds what somebody once vouched for."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from scope_contracts.errors import DamageError, UserInputError
from scope_rt.models.content_cache import ContentCache
from scope_rt.models.file_contents import MANIFEST_NAME, FileEntry
from scope_rt.models.folder_contents import kept_entries
from scope_rt.models.layout import Layout
from scope_rt.models.loading import EMBEDDED, embedded_folder
from scope_rt.models.manifest import Difference, Manifest, refusal
from scope_runners.inspect_model import ACTIONS, check_arguments
from scope_runners.parts import add_parts_argument
from scope_runners.wording import counted, printable

_FIRST_USE = "what this machine read at first use"
"""In place of a manifest, which may have been written where the folder is from."""


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `scope-rt model`."""
    add = parser.add_argument
    add(
        "action",
        choices=["inspect", "recipes", "verify"],
        help="inspect: say what a folder is and whether it could be streamed; recipes: list the "
        "families of checkpoints, or print the file of one; verify: read every byte and compare",
    )
    add("folder", nargs="?", metavar="FOLDER", help=f"a model folder, or {EMBEDDED}")
    add("--recipe", metavar="NAME", help="as of `scope-rt stream`")
    add_parts_argument(parser)
    add(
        "--write",
        action="store_true",
        help=f"vouch for what the folder holds now: write {MANIFEST_NAME} into it",
    )
    add("--json", action="store_true", help="print one JSON object instead")


def run_model(namespace: argparse.Namespace) -> int:
    """Do what was asked for; returns the exit code.

    Raises:
        UserInputError: the folder cannot be read, or nothing is known to compare it with.
        FingerprintError: a tensor or a file is not what it was; the first one is named.
    """
    if namespace.folder is None and namespace.action != "recipes":
        raise UserInputError(f"model {namespace.action} needs a folder; name one")
    if (action := ACTIONS.get(namespace.action)) is not None:
        check_arguments(namespace)
        code: int = action(namespace)
        return code
    return _verify(namespace)


def _verify(namespace: argparse.Namespace) -> int:
    """Compare, or write; raises as `run_model`."""
    folder = embedded_folder() if namespace.folder == EMBEDDED else Path(namespace.folder)
    if not folder.is_dir():
        raise UserInputError(f"model folder {str(folder)!r} does not exist; give a folder")
    if namespace.write or namespace.recipe is not None:
        Layout.of(folder, namespace.recipe)  # nobody vouches for what is no model folder yet
    found = Manifest.of(folder)
    if namespace.write:
        print(f"written: {found.write(folder)}", file=sys.stderr)
        return 0
    known, source = Manifest.read(folder), MANIFEST_NAME
    if known is None:
        known, source = Manifest(files=_first_read(folder)), _FIRST_USE
    if not known.files:
        raise UserInputError(
            f"model folder {folder}: nothing is known to compare it with; once it is as you want "
            f"it, vouch for what it holds with scope-rt model verify {folder} --write"
        )
    differences = sorted(known.differences(found), key=lambda each: (each.file, each.tensor or ""))
    show = _json if namespace.json else _table
    text = show(found, differences, source)
    print(text, flush=True)
    if differences:
        raise DamageError(*refusal(folder, differences[0]).args)  # what was asked for: code 1
    return 0


def _first_read(folder: Path) -> dict[str, FileEntry]:
    cache = ContentCache.of(folder)
    return {} if cache is None else kept_entries(folder, cache.load())


def _table(found: Manifest, differences: Sequence[Difference], source: str) -> str:
    rows = [f"compared with {source}"]
    for name in sorted({*found.files, *(each.file for each in differences)}):
        of_file = [each for each in differences if each.file == name]
        num_tensors = len(found.files[name].tensors) if name in found.files else 0
        tensors = counted(num_tensors, "tensor") if num_tensors else ""
        rows.append(f"{'NOT whole' if of_file else 'whole':<10} {tensors:>12}  {name}")
        rows += [f"{'':<10} {'':>12}  {each}" for each in of_file]
    return "\n".join(map(printable, rows))


def _json(found: Manifest, differences: Sequence[Difference], source: str) -> str:
    plain = {
        "compared_with": source,
        "files": {name: len(entry.tensors) for name, entry in found.files.items()},
        "differences": [
            {"file": each.file, "tensor": each.tensor, "what": each.what} for each in differences
        ],
    }
    return json.dumps(plain, indent=2)
