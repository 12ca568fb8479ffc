"""Ranks are killed while diffusers' VAE decodes a checkpoint's stream from caches that it carries:
the pictures go on bit for bit as those of a stream that only rebuilds its past at that chunk."""

from dataclasses import replace

import pytest

from scope_rt.models.family import Family
from scope_rt.models.loading import ModelFolder
from scope_rt.topology import Topology
from scope_runners.break_it.catalogue import case_named
from scope_runners.break_it.driver import Driver, recomputing_family
from scope_runners.break_it.scenario import PP1, TP2
from scope_runners.break_it.suite import Suite
from scope_runners.break_it.table import rows
from scope_runners.break_it.verdict import Verdict
from tests.break_it.broken import HEARTBEAT_S
from tests.real_checkpoints import FASTVIDEO, NEEDS_WAN

pytestmark = [NEEDS_WAN, pytest.mark.lab, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    folder = tmp_path_factory.mktemp("killed")
    family = Family.named("fastvideo-1.3b")
    small = replace(family.recipe, default_height=16, default_width=32, window_frames=6)
    recipe = folder / "small.toml"
    recipe.write_text(replace(family, recipe=small).to_toml())
    model = ModelFolder.open(FASTVIDEO, str(recipe))
    return Driver(
        model=str(model.path),
        family=str(recipe),
        recomputing_family=recomputing_family(model, str(recipe), folder),
        recipe=model.recipe,
        prompt="A small red fox.",
        folder=folder / "runs",
        bound_s=90.0,
        heartbeat_s=HEARTBEAT_S,
    )


@pytest.mark.parametrize("topology", [PP1, TP2], ids=lambda each: str(each.plan_id))
@pytest.mark.parametrize("rank", [0, 1])
def test_pictures_go_on_as_if_the_past_had_been_rebuilt_there(
    driver: Driver, topology: Topology, rank: int
) -> None:
    role = "rank0" if rank == 0 else "leader" if topology is PP1 else "follower"
    result = Suite(driver=driver, topology=topology).run(case_named(f"kill/{role}/denoise"))
    assert result.verdict is Verdict.PASSED, rows(result)
    assert result.ends[rank] == "killed"
    assert (result.num_chunks, result.num_wrong) == (8, 0)
