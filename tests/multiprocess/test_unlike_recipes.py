"""Ranks that were given unlike recipes for one folder never make a chunk together."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from scope_contracts.errors import ParityError
from scope_rt.config import StreamConfig
from scope_rt.models.family import Family
from scope_rt.session import StreamSession
from tests.multiprocess.ranks import Ranks
from tests.tiny_folder import RECIPE, write_tiny_folder


def error_of_unlike_recipes(folder: Path, plan: str, tp: int) -> str:
    """What this rank raises; the last rank has a recipe of another shift."""
    is_last = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
    recipe = folder.parent / f"{'other' if is_last else 'own'}.toml"
    config = StreamConfig.load(model=folder, recipe=str(recipe), plan=plan, tp=tp)
    try:
        with StreamSession(config) as session:
            list(session.stream("red circle", num_chunks=1))
    except ParityError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("plan", "num_ranks", "tp"), [("tp_v1_1", 2, 2), ("pp0", 2, 1)])
def test_unlike_recipes_are_refused_at_the_start(
    ranks: Ranks, tmp_path: Path, plan: str, num_ranks: int, tp: int
) -> None:
    folder = write_tiny_folder(tmp_path / "model")
    for name, shift in (("own", 5.0), ("other", 8.0)):
        text = Family(name=name, recipe=replace(RECIPE, shift=shift)).to_toml()
        (tmp_path / f"{name}.toml").write_text(text)
    said = ranks.results(num_ranks, error_of_unlike_recipes, folder=folder, plan=plan, tp=tp)
    assert all("model_recipe: rank 0 has" in error for error in said)
