"""`scripts/lab kill_stream`: SIGKILL at every change of the disk that `scope-rt stream` makes.

One stream tells how often it changes the disk through `os`. Then it is begun anew for each of these
changes and killed before it, in the middle of it where it is a write, and after it; resumed (or
begun anew where nothing was left), its video must have the chunks and frames of the stream that
nothing happened to, and nothing may be left beside it.
"""

import json
import os
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import av
import torch

from scope_contracts.errors import ScopeError
from scope_runners import stream
from scope_runners.arguments import positive
from scope_runners.command_parser import CommandParser
from scope_runners.exit_codes import FAILED

CHANGES = ("write", "pwrite", "replace", "unlink", "ftruncate", "mkdir", "rmdir")
ARGUMENTS = ("--prompt", "a red circle", "--prompt-at", "1s:a green square", "--hard-cut-at", "2s")


class Moment(StrEnum):
    """When a change is cut short."""

    BEFORE = "before"
    HALF = "half"
    AFTER = "after"


@dataclass(frozen=True, slots=True)
class Made:
    """What a finished stream left."""

    chunks: tuple[tuple[int, int, str, int], ...]
    """Index, pictures, prompt and epoch of each."""
    num_frames: int
    files: tuple[str, ...]


def main(argv: Sequence[str]) -> int:
    """Run the experiment; 1 where a chunk was lost, repeated or damaged."""
    parser = CommandParser(prog="scripts/lab kill_stream", description=__doc__)
    parser.add_argument("--seconds", type=positive, default=3, help="of video (default 3)")
    parser.add_argument("--every", type=positive, default=1, help="try each n-th change only")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    arguments = [*ARGUMENTS, "--seconds", str(args.seconds), "--out", "v.mp4"]
    with TemporaryDirectory(prefix="scope-kill-") as name:
        whole = _folder(Path(name), "whole")
        if code := _stream(whole, arguments):
            raise ScopeError(f"the stream that nothing happens to ended with {code}")
        want, num_changes = _made(whole), int((whole.parent / "whole.changes").read_text())
        print(f"{len(want.chunks)} chunks, {want.num_frames} frames, {num_changes} changes")
        num_killed, wrong = 0, []
        for moment in Moment:
            for number in range(1, num_changes + 1, args.every):
                case = f"{moment}-{number}"
                folder = _folder(Path(name), case)
                num_killed += _stream(folder, arguments, kill=(number, moment)) == -signal.SIGKILL
                if (complaint := _resumed(folder, arguments, want)) is not None:
                    wrong.append(f"{case}: {complaint}")
        print(f"killed {num_killed} times; wrong afterwards: {len(wrong)}", *wrong, sep="\n  ")
    return FAILED if wrong or not num_killed else 0


def _resumed(folder: Path, arguments: Sequence[str], want: Made) -> str | None:
    """Finish the stream of `folder`; what is wrong with it, if anything is."""
    left = [folder / ".v.mp4.snapshot", folder / ".v.mp4.log"]
    if not (folder / "v.json").exists() or any(path.exists() for path in left):
        code = _stream(folder, [*arguments, "--resume"])
        if code:  # what never began, or is finished, is begun anew
            code = _stream(folder, arguments)
        if code:
            return f"ended with {code}"
    got = _made(folder)
    return None if got == want else f"got {got}, want {want}"


def _stream(
    folder: Path, arguments: Sequence[str], *, kill: tuple[int, Moment] | None = None
) -> int:
    """Run the command in a process of its own; its exit code, negative for a signal."""
    child = os.fork()
    if child == 0:
        code = FAILED
        try:
            os.chdir(folder)
            said = os.open(os.devnull, os.O_WRONLY)
            os.dup2(said, 1)
            os.dup2(said, 2)
            count = _counting(kill)
            code = stream.main(arguments)
            (folder.parent / f"{folder.name}.changes").write_text(str(count()))
        except BaseException:  # noqa: BLE001 - it must not come back as a second parent
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _counting(kill: tuple[int, Moment] | None) -> Callable[[], int]:
    """Count this process's changes of a disk, and kill it at one; how many there were."""
    done, lock = 0, threading.Lock()

    def counted(change: Callable[..., Any], *, is_write: bool) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            nonlocal done
            if is_write and arguments[0] in (1, 2):
                return change(*arguments, **options)
            with lock:
                done += 1
                moment = kill[1] if kill is not None and kill[0] == done else None
            if moment is Moment.HALF and is_write:
                file, data, *more = arguments
                change(file, bytes(data)[: len(data) // 2], *more)
            if moment in (Moment.BEFORE, Moment.HALF):
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return change(*arguments, **options)
            finally:
                if moment is Moment.AFTER:
                    os.kill(os.getpid(), signal.SIGKILL)

        return run

    for name in CHANGES:
        setattr(os, name, counted(getattr(os, name), is_write=name.endswith("write")))
    return lambda: done


def _folder(root: Path, name: str) -> Path:
    folder = root / name
    folder.mkdir()
    return folder


def _made(folder: Path) -> Made:
    chunks = json.loads((folder / "v.json").read_text())["chunks"]
    with av.open(str(folder / "v.mp4")) as container:
        num_frames = sum(1 for _ in container.decode(video=0))
    # A summary or a sheet that was being written keeps the number of its process.
    left = (path.name for path in folder.iterdir() if ".partial." not in path.name)
    keys = ("chunk_index", "frames", "prompt", "cache_epoch")
    return Made(
        chunks=tuple((c[keys[0]], c[keys[1]], c[keys[2]], c[keys[3]]) for c in chunks),
        num_frames=num_frames,
        files=tuple(sorted(left)),
    )
