"""A picture that only rank0 has begins the same stream in every plan."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from scope_rt.config import StreamConfig
from scope_rt.control.scheduled_event import ScheduledEvent
from scope_rt.session import StreamSession
from tests.multiprocess.ranks import Ranks
from tests.rounding import TP_CONTRACT
from tests.tiny_folder import FRAMEWISE_RECIPE, write_tiny_folder

pytestmark = pytest.mark.timeout(300)

NUM_CHUNKS = 6
EVENTS = (
    ScheduledEvent(chunk_index=2, prompt="a blue square"),
    ScheduledEvent(chunk_index=4, recompute=True),
)
PLANS = [("single", 1), ("pp0", 1), ("tp_v0", 2), ("tp_v1_1", 2), ("pp0", 2), ("pp1", 2)]


@pytest.fixture(scope="module")
def framewise(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("framewise"), FRAMEWISE_RECIPE)


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("picture") / "start.png"
    noise = np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    return path


def stream(
    folder: Path, plan: str, tp: int, image: Path, without: int | None = None
) -> list[dict[str, Any]]:
    """One stream, as every rank runs it: all but rank0 are told of a file that is not there, and
    rank `without` of none."""
    rank = int(os.environ["RANK"])
    mine = image if rank == 0 else Path("/not/there.png")
    config = StreamConfig.load(
        model=folder,
        plan=plan,
        tp=tp,
        seed=11,
        integrity="strict",
        image=None if rank == without else mine,
    )
    with StreamSession(config) as session:
        chunks = session.stream("a red circle", num_chunks=NUM_CHUNKS, schedule=EVENTS)
        return [
            {
                "sha256": chunk.latents_sha256,
                "latents": chunk.latents.numpy(),
                "frames": chunk.frames,
                "calls": chunk.generator_calls,
            }
            for chunk in chunks
        ]


@pytest.fixture(scope="module")
def streams(
    ranks: Ranks, framewise: Path, picture: Path
) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """The stream of every plan, as rank0 emitted it."""
    emitted = {}
    for plan, tp in PLANS:
        world = tp + plan.startswith("pp")
        asked = {"folder": framewise, "plan": plan, "tp": tp, "image": picture}
        emitted[plan, tp] = ranks.results(world, stream, **asked)[0]
    return emitted


@pytest.mark.parametrize("tp", [1, 2])
def test_equal_tp_degree_gives_equal_bits_after_a_picture(
    streams: dict[Any, list[dict[str, Any]]], tp: int
) -> None:
    first, *others = [chunks for (_, degree), chunks in streams.items() if degree == tp]
    assert len(others) == {1: 1, 2: 3}[tp]
    assert [chunk["calls"] for chunk in first] == [1, 4, 3, 3, 4, 3]
    for other in others:
        assert [c["sha256"] for c in other] == [c["sha256"] for c in first]
        assert all((a["frames"] == b["frames"]).all() for a, b in zip(other, first, strict=True))


def test_another_tp_degree_moves_all_but_the_picture_by_rounding_only(
    streams: dict[Any, list[dict[str, Any]]],
) -> None:
    alone, shared = streams["single", 1], streams["tp_v1_1", 2]
    assert alone[0]["sha256"] == shared[0]["sha256"]
    for mine, theirs in zip(shared[1:], alone[1:], strict=True):
        assert 0 < abs(mine["latents"] - theirs["latents"]).max() <= TP_CONTRACT


@pytest.mark.parametrize(("plan", "without"), [("pp0", 2), ("tp_v1_1", 1), ("tp_v0", 0)])
def test_a_rank_that_was_not_told_of_the_picture_is_named_before_any_chunk(
    ranks: Ranks, framewise: Path, picture: Path, plan: str, without: int
) -> None:
    world = 2 + plan.startswith("pp")
    asked: dict[str, Any] = {"folder": framewise, "image": picture, "without": without}
    first, other = without != 0, without == 0
    for _, error in ranks.run(world, stream, plan=plan, tp=2, **asked):
        assert error is not None
        said = error.splitlines()[0]
        assert said.startswith(f"ParityError: start_frame: rank 0 has {first}, rank ")
        assert f"has {other}; give both the same value" in said
