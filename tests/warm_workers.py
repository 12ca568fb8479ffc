"""Workers of pytest-xdist forked from one process that has imported the tests; not a test itself.

To import them takes a worker ten seconds of a core, and in a fresh clone as many to compile them:
here one process does so for all workers, which collect again what they find imported.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.warm_python import Process, Server

ROOT = Path(__file__).parents[1]


def server(folder: Path, ranks: Server, paths: Sequence[str]) -> Server:
    """Forked from that of `ranks`; it ends where the tests of `paths` cannot be imported."""
    first = f"from tests import warm_workers\nassert warm_workers.collect({[*paths]!r})"
    return Server(folder / "workers", of=ranks, first=first)


def python(server: Server) -> str:
    """The command that is the interpreter of a worker which `server` forks."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    code += f"from tests.warm_workers import stand_in; stand_in({str(server.path)!r})"
    return shlex.join([sys.executable, "-c", code])


def stand_in(path: str) -> None:
    """Be the parent of a worker, to which this process's standard streams and arguments go."""
    code = Process([sys.executable, *sys.argv[1:]], server=Server(Path(path))).wait()
    sys.exit(code if code >= 0 else 128 - code)


class _NotWhole:
    """The files that were skipped on import, of which a half is imported."""

    def __init__(self) -> None:
        self.paths = set[Path]()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self.paths.add(ROOT / report.nodeid)


def collect(paths: Sequence[str]) -> bool:
    """Import the tests of `paths`, as pytest does; whether all could be imported or are skipped."""
    not_whole = _NotWhole()
    options = ["--collect-only", "-qq", "-p", "no:cacheprovider", "-p", "no:xdist"]
    if pytest.main([*options, *paths], plugins=[not_whole]) != pytest.ExitCode.OK:
        return False
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "") in not_whole.paths:
            del sys.modules[name]
    return True
