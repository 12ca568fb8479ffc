"""One suite for all faults: a small random model, ranks of real processes, and its clean runs."""

import pytest

from scope_rt.models.loading import ModelFolder
from scope_runners.break_it.driver import Driver, recomputing_family
from scope_runners.break_it.suite import Suite
from tests.break_it.broken import HEARTBEAT_S, Broken
from tests.tiny_folder import write_tiny_folder


@pytest.fixture(scope="session")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    folder = tmp_path_factory.mktemp("break-it")
    model = ModelFolder.open(write_tiny_folder(folder / "model"))
    driver = Driver(
        model=str(model.path),
        family=None,
        recomputing_family=recomputing_family(model, None, folder),
        recipe=model.recipe,
        prompt="a red circle",
        folder=folder / "runs",
        bound_s=60.0,
        hang_bound_s=8.0,
        heartbeat_s=HEARTBEAT_S,
    )
    return Suite(driver=driver)


@pytest.fixture(scope="session")
def broken(suite: Suite) -> Broken:
    return Broken(suite)
