"""Tests keep what they learn of model folders to themselves, and share one import of the ranks."""

import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import warm_python

gc.disable()  # until all is imported: nothing of it is garbage


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
def _warm_processes() -> Iterator[None]:
    """Launchers fork their ranks from a server that has imported them; see `warm_python`."""
    # Paths of Unix sockets are short, which the folders of tests need not be.
    with (
        tempfile.TemporaryDirectory(prefix="warm") as folder,
        warm_python.Server(Path(folder) / "server") as server,
    ):
        warm_python.Process.server = server
        warm_python.warm_launchers()
        yield
