"""Processes that SIGKILL themselves at their n-th change of a disk, for every n; not a test itself.

`python -m tests.record.killed MODULE:FUNCTION FOLDER STEP` forks a process for every n, or every
STEP-th, in `FOLDER/n`, which calls FUNCTION(folder, report); `report(word)` adds a line to
`FOLDER/n/reported`. With an odd n the last change is only half made, where it is a write.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from tests import warm_python

CHANGES = ("write", "pwrite", "replace", "unlink", "ftruncate", "rmdir")
_MOST_CHANGES = 2_000
Report = Callable[[str], None]


def lives(
    scenario: Callable[[Path, Report], None], folder: Path, *, step: int = 1
) -> Iterator[tuple[Path, list[str]]]:
    """The folder of every life of `scenario`, and what it had reported; the last one ended well.

    With an odd `step`, every other life ends at a change that is half made.
    """
    name = f"{scenario.__module__}:{scenario.__name__}"
    command = [sys.executable, "-m", "tests.record.killed", name, str(folder), str(step)]
    ended = warm_python.run(command, cwd=Path(__file__).parents[2], timeout=110)
    assert ended.returncode == 0, ended.stderr
    for life in sorted(folder.iterdir(), key=lambda path: int(path.name)):
        reported = life / "reported"
        words = reported.read_text().split() if reported.exists() else []
        reported.unlink(missing_ok=True)
        yield life, words


def _kill_at(number: int) -> None:
    """Count the changes of this process, of all threads, in twos: half made, and made."""
    left, lock = number, threading.Lock()

    def counted(change: Callable[..., Any], *, is_write: bool) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            with lock:
                left -= 2
                mine = left
            if mine == -1 and is_write:
                file, data, *more = arguments
                change(file, bytes(data)[: len(data) // 2], *more)
            if mine == -1:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return change(*arguments, **options)
            finally:
                if mine == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        return run

    for name in CHANGES:
        setattr(os, name, counted(getattr(os, name), is_write=name.endswith("write")))


def _live(scenario: Callable[[Path, Report], None], folder: Path, number: int) -> None:
    folder.mkdir()
    reports = os.open(folder / "reported", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    write = os.write

    def report(word: str) -> None:
        write(reports, f"{word}\n".encode())

    _kill_at(number)
    scenario(folder, report)


def main(name: str, folder: Path, step: int) -> None:
    module, function = name.split(":")
    scenario = getattr(import_module(module), function)
    folder.mkdir()
    for number in range(1, _MOST_CHANGES, step):
        if (child := os.fork()) == 0:
            try:
                _live(scenario, folder / str(number), number)
            except BaseException:  # noqa: BLE001 - it must not come back as a second parent
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            sys.exit(os.waitstatus_to_exitcode(status))
    sys.exit("the scenario has no end")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
