"""A rank under test keeps what it prints, and reports how it ended before it ends."""

import os
import sys
from collections.abc import Callable
from pathlib import Path


def redirect_output(path: Path) -> None:
    """Append standard output and standard error of this process to a file."""
    sys.stdout.flush()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)


class EndReport:
    """Reports the error that ended the block, None where there was none; the error is raised on."""

    def __init__(self, report: Callable[[BaseException | None], object]) -> None:
        self._report = report

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._report(error)
