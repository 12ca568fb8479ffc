"""The pool of ranks all tests of this folder share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multiprocess.ranks import Ranks
from tests.tiny_folder import write_tiny_folder


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(4)
    yield pool
    pool.kill()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model"))
