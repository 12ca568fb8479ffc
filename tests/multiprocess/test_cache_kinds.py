"""Every kind of cache gives the same video in every plan, and ranks that evict differently stop."""

from pathlib import Path
from typing import Any

import pytest

from scope_rt.config import StreamConfig
from scope_rt.control.scheduled_event import ScheduledEvent
from scope_rt.faults import FaultPoint
from scope_rt.instruments import Instruments
from scope_rt.launch_environment import LaunchEnvironment
from scope_rt.session import StreamSession
from scope_runners.break_it.faults import FaultPlan, InjectedFaults, at
from tests.multiprocess.ranks import Ranks
from tests.rounding import TP_CONTRACT

NUM_CHUNKS = 7
REBUILD = ScheduledEvent(chunk_index=5, recompute=True)


def stream(folder: Path, plan: str, tp: int, kind: str) -> tuple[list[Any], tuple[int, ...]]:
    """A stream as rank0 emitted it, and the frames a generator rank ends with."""
    config = StreamConfig.load(model=folder, plan=plan, tp=tp, seed=11, kv_cache=kind)
    with StreamSession(config) as session:
        chunks = session.stream("a red circle", num_chunks=NUM_CHUNKS, schedule=[REBUILD])
        made = [(chunk.latents_sha256, chunk.latents.numpy()) for chunk in chunks]
        worker = session._rank._worker
        return made, () if worker is None else worker._generator.cache.frames_kept


def hashes(made: list[Any]) -> list[str]:
    return [sha256 for sha256, _ in made]


@pytest.mark.parametrize("kind", ["h2o", "quantized:int8", "paged:int8", "hierarchical"])
def test_a_kind_of_cache_gives_the_same_video_in_every_plan(
    ranks: Ranks, folder: Path, kind: str
) -> None:
    """The kind that keeps most beside its rows in all; the others in the three least alike."""

    def run(plan: str, tp: int) -> tuple[list[Any], list[tuple[int, ...]]]:
        world = tp + plan.startswith("pp")
        job = {"folder": folder, "plan": plan, "tp": tp, "kind": kind}
        results = ranks.results(world, stream, **job)
        return results[0][0], [kept for _, kept in results if kept]

    alone, (kept,) = run("single", 1)
    if kind == "h2o":
        assert hashes(run("pp0", 1)[0]) == hashes(alone)
    shared, kept_of_ranks = run("tp_v1_1", 2)
    assert kept_of_ranks == [kept, kept], "ranks or degrees evicted differently"
    for plan in ("tp_v0", "pp1") if kind == "h2o" else ("pp1",):
        assert hashes(run(plan, 2)[0]) == hashes(shared)
    worst = max(abs(a - b).max() for (_, a), (_, b) in zip(alone, shared, strict=True))
    assert worst <= TP_CONTRACT
    assert hashes(shared) != hashes(alone), "was this really another degree?"


def misjudged(folder: Path, faults: FaultPlan) -> None:
    config = StreamConfig.load(
        model=folder, plan="tp_v1_1", tp=2, seed=11, kv_cache="h2o", digest_every=1
    )
    here = LaunchEnvironment.from_environment()
    injected = InjectedFaults(faults, rank=here.rank, attempt=here.attempt)
    with StreamSession(config, instruments=Instruments(faults=injected)) as session:
        list(session.stream("a red circle", num_chunks=NUM_CHUNKS))


def test_a_rank_with_other_scores_is_named_before_it_evicts_another_frame(
    ranks: Ranks, folder: Path
) -> None:
    fault = at(rank=1, chunk=3, point=FaultPoint.GENERATOR, action="misjudge_frames")
    answers = ranks.run(2, misjudged, folder=folder, faults=FaultPlan(faults=(fault,)))
    for _, error in answers:
        assert error is not None
        assert error.startswith("ParityError: chunk 3: scores: rank 0 has '")
        assert "rank 1 has '" in error


def stream_on_two_kinds(folder: Path) -> None:
    kind = "quantized" if LaunchEnvironment.from_environment().rank else None
    config = StreamConfig.load(model=folder, plan="tp_v1_1", tp=2, kv_cache=kind)
    with StreamSession(config) as session:
        list(session.stream("a red circle", num_chunks=1))


def test_ranks_with_different_caches_stop_before_the_first_collective(
    ranks: Ranks, folder: Path
) -> None:
    answers = ranks.run(2, stream_on_two_kinds, folder=folder)
    want = "ParityError: kv_cache (SCOPE_KV_CACHE): rank 0 has 'ring', rank 1 has 'quantized:int8'"
    assert all(error and error.startswith(want) for _, error in answers)
