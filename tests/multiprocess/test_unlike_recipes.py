"""Ranks that were given unlike recipes or codecs for one folder never make a chunk together."""

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


def is_last() -> bool:
    return os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)


def parity_error(config: StreamConfig) -> str:
    """What this rank raises; "" where it streams."""
    try:
        with StreamSession(config) as session:
            list(session.stream("red circle", num_chunks=1))
    except ParityError as error:
        return str(error)
    return ""


def error_of_unlike_recipes(folder: Path, plan: str, tp: int) -> str:
    """The last rank has a recipe of another shift."""
    recipe = folder.parent / f"{'other' if is_last() else 'own'}.toml"
    return parity_error(StreamConfig.load(model=folder, recipe=str(recipe), plan=plan, tp=tp))


def error_of_unlike_codecs(folder: Path, plan: str) -> str:
    """The last rank's codec computes in other numbers."""
    dtype = "bfloat16" if is_last() else "float32"
    return parity_error(StreamConfig.load(model=folder, plan=plan, tp=2, codec_dtype=dtype))


def test_ranks_that_decode_in_other_numbers_are_refused_and_others_are_not_asked(
    ranks: Ranks, folder: Path
) -> None:
    both = ranks.results(2, error_of_unlike_codecs, folder=folder, plan="tp_v0")
    want = "codec_dtype: rank 0 has 'float32', rank 1 has 'bfloat16'; give all ranks one"
    assert all(want in error for error in both), both
    assert ranks.results(2, error_of_unlike_codecs, folder=folder, plan="tp_v1_1") == ["", ""]


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
