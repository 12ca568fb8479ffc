"""Tests keep what they learn of model folders to themselves, and share one import of the ranks."""

import gc
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from tests import warm_workers
from tests.warm_python import Process, Server, warm_launchers

RANKS_SERVER = pytest.StashKey[Server]()

RANKS = "warm_ranks"
"""What a worker is told: where the server of ranks is that all workers share."""


def pytest_sessionstart() -> None:
    """Until all is imported nothing of it is garbage."""
    gc.disable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Workers are forked from one process that has imported the tests; see `warm_workers`.

    Where those cannot be imported, each worker imports them itself, and says why.
    """
    stack = ExitStack()
    config.add_cleanup(stack.close)
    # Paths of Unix sockets are short, which the folders of tests need not be.
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warm")))
    config.stash[RANKS_SERVER] = ranks = stack.enter_context(Server(folder / "ranks"))
    workers = stack.enter_context(warm_workers.server(folder, ranks, config.args))
    with suppress(RuntimeError):
        workers.start()
        for spec in specs:
            spec.python = warm_workers.python(workers)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput[RANKS] = str(node.config.stash[RANKS_SERVER].path)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the cache of the user who runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def pytest_collection_finish() -> None:
    """What was imported is no garbage: to look through it again and again takes seconds."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file begins first: the last one would be all that a worker has left to do."""
    items.sort(key=lambda item: item.path.name != "test_cpu_kernels.py")


@pytest.fixture(autouse=True, scope="session")
def _warm_processes(pytestconfig: pytest.Config) -> Iterator[None]:
    """Launchers fork their ranks from a server that has imported them; see `warm_python`."""
    shared = getattr(pytestconfig, "workerinput", {}).get(RANKS)
    with (
        tempfile.TemporaryDirectory(prefix="warm") as folder,
        Server(Path(shared or f"{folder}/ranks")) as Process.server,
    ):
        warm_launchers()
        yield
