"""What enters and leaves the blocks is found wrong by the check that is there for it alone."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from scope_contracts.errors import IntegrityError
from scope_rt.integrity.audit_plan import CallPlan
from scope_rt.integrity.edge_reference import noise_of, rotation_table, sigma_of, timesteps_of
from scope_rt.models.generator import ChunkGenerator
from scope_rt.models.noise import SeededNoise
from scope_rt.models.rope import rotations
from scope_rt.models.schedule import FlowSchedule
from tests.integrity.audited import Fault
from tests.integrity.edged import EDGE_FAULTS, EdgedStream, edged_stream
from tests.integrity.sharded import sharded
from tests.thread_ranks import on_all_ranks, thread_ranks
from tests.tiny_models import STEPS, Rollout, envelope

NUM_CALLS = len(STEPS) + 1
FAULTS = pytest.mark.parametrize("fault", EDGE_FAULTS, ids=str)


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("every", [1, 3])
def test_a_clean_stream_passes(dtype: torch.dtype, every: int) -> None:
    edged = edged_stream(dtype, every=every)
    edged.run(range(6))
    edged.run([6], new_text=True)
    edged.run(range(7, 16))


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_clean_recompute_passes(dtype: torch.dtype) -> None:
    rollout = Rollout(sink=0, window=9, dtype=dtype)
    EdgedStream(rollout, recomputes=True).run(range(4))


@pytest.mark.numeric
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_clean_group_passes(dtype: torch.dtype) -> None:
    of_rank = [sharded(group, dtype) for group in thread_ranks(2)]
    on_all_ranks(2, lambda rank: EdgedStream(of_rank[rank], rank=rank).run(range(3)))


@FAULTS
def test_strict_finds_a_fault_in_its_chunk(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    edged = edged_stream()
    edged.run(range(3))
    fault.bring_about(edged.rollout, monkeypatch)
    with pytest.raises(IntegrityError, match=rf"chunk 3, rank 0(, )?.*({fault.names})"):
        edged.run([3])


@FAULTS
def test_default_finds_a_fault_within_its_turns(
    fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = 2
    edged = edged_stream(every=every)
    edged.run(range(3))
    fault.bring_about(edged.rollout, monkeypatch)
    stage = fault.names.split(": ")[-1]
    with pytest.raises(IntegrityError, match=f"rank 0.*{stage}"):
        edged.run(range(3, 3 + every * NUM_CALLS))


@pytest.fixture(scope="module")
def right() -> torch.Tensor:
    """What a stream shows to which nothing happens."""
    clean = edged_stream()
    clean.run(range(3))
    return clean.run([3, 4])


@FAULTS
def test_a_fault_gets_through_where_its_check_is_disarmed(
    fault: Fault, right: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    edged = edged_stream(check=fault.check)
    edged.run(range(3))
    fault.bring_about(edged.rollout, monkeypatch)
    assert not torch.equal(edged.run([3, 4]), right)


def test_a_fault_of_all_ranks_alike_is_found_by_each(monkeypatch: pytest.MonkeyPatch) -> None:
    of_rank = [sharded(group, torch.float32) for group in thread_ranks(2)]
    fault, said = EDGE_FAULTS[1], list[str]()

    def body(rank: int) -> None:
        edged = EdgedStream(of_rank[rank], rank=rank)
        edged.run(range(2))
        fault.bring_about(of_rank[rank], monkeypatch)
        with pytest.raises(IntegrityError) as caught:
            edged.run([2])
        said.append(str(caught.value))

    on_all_ranks(2, body)
    assert sorted(each.split(":")[0] for each in said) == [
        "chunk 2, rank 0, call 0",
        "chunk 2, rank 1, call 0",
    ]


def test_a_start_from_another_seed_is_found() -> None:
    edged = edged_stream()
    edged.run(range(2))
    with pytest.raises(IntegrityError, match="chunk 2, rank 0: latents_in"):
        edged.run([2], seed=4)
    edged_stream(check="noise").run([0], seed=4)


def test_a_recompute_is_looked_at_in_a_chunk_that_has_no_turn() -> None:
    rollout = Rollout(sink=0, window=9, dtype=torch.float32)
    edged = EdgedStream(rollout, every=8, recomputes=True)
    patch = next(fault for fault in EDGE_FAULTS if "patch embedding" in fault.names)
    with pytest.MonkeyPatch.context() as patching:
        patch.bring_about(rollout, patching)
        with pytest.raises(IntegrityError, match="chunk 3, rank 0, call 0: patch embedding"):
            edged.run([3], new_text=True)


def test_other_context_than_was_sent_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = Rollout(sink=0, window=9, dtype=torch.float32)
    edged, real = EdgedStream(rollout, recomputes=True), type(rollout.generator)._recompute
    edged.run(range(1))
    monkeypatch.setattr(
        type(rollout.generator),
        "_recompute",
        lambda self, context, *rest: real(self, context * 1.02, *rest),
    )
    with pytest.raises(IntegrityError, match="chunk 1, rank 0, call 0: input"):
        edged.run([1])


def test_a_call_that_was_not_planned_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    edged = edged_stream()
    edged.run([0])
    kind = type(edged.rollout.generator)
    real: Any = kind._call

    def twice(self: ChunkGenerator, *given: Any) -> torch.Tensor:
        real(self, *given[:-2], lambda: None, given[-1])
        flow: torch.Tensor = real(self, *given)
        return flow

    monkeypatch.setattr(kind, "_call", twice)
    with pytest.raises(IntegrityError, match="chunk 1, rank 0: the model ran 8 of 4 calls"):
        edged.run([1])


def test_a_chunk_that_failed_leaves_nothing_behind() -> None:
    edged = edged_stream()
    edged.run([0])
    edged.rollout.generator.cache.reset()
    with pytest.raises(Exception, match="cache ends at token"):
        edged.run([1])
    edged.edges.abandon()
    edged.made.abandon()
    assert not any(
        module._forward_hooks or module._forward_pre_hooks
        for module in edged.rollout.model.modules()
    )


@pytest.mark.numeric
@pytest.mark.parametrize("first", [0, 13, 10**6])
def test_the_rotations_of_any_frame_are_those_of_the_model(first: int) -> None:
    plan = CallPlan(first_frame=first, num_frames=3, rows=5, columns=4)
    table = rotations(range(first, first + 3), grid=(5, 4), head_dim=16, dtype=torch.complex64)
    value, bound = rotation_table(plan, 16, 2.0**-24)
    assert bool(((torch.view_as_real(table[:, 0]) - value).abs() <= bound).all())


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0, 8.0])
def test_every_timestep_has_the_sigma_of_the_table(shift: float) -> None:
    schedule = FlowSchedule(shift=shift)
    warped = schedule.warp(tuple(float(step) for step in range(1000, 0, -7)))
    for timestep in (*warped, 1000.0, 750.0, 500.0, 250.0, 937.5, 1.25):
        own = sigma_of(timestep, shift=shift, num_steps=1000)
        assert own == pytest.approx(schedule.sigma(timestep), abs=1e-15)


def test_noise_is_that_of_the_stream_s_source() -> None:
    plan = replace(envelope(4), cache_epoch=2, base_seed=-5)
    source = SeededNoise().draw(
        base_seed=-5, cache_epoch=2, chunk_index=4, step=1, shape=(1, 3, 4, 4, 4)
    )
    assert torch.equal(noise_of(plan, 1, (1, 3, 4, 4, 4)), source)


def test_a_chunk_s_calls_are_a_recompute_its_steps_and_a_clean_pass() -> None:
    assert timesteps_of(envelope(1)) == [*STEPS, 0.0]
    plan = replace(envelope(1), do_kv_recompute=True, clean_pass=False)
    assert timesteps_of(plan) == [0.0, *STEPS]


@pytest.mark.parametrize("name", ["latents shifted", "clean pass of other latents"])
def test_what_is_shown_is_what_later_chunks_see_in_every_chunk_of_default(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fault,) = (fault for fault in EDGE_FAULTS if fault.name == name)
    edged = edged_stream(every=8)
    edged.run(range(3))
    fault.bring_about(edged.rollout, monkeypatch)
    with pytest.raises(IntegrityError, match=f"chunk 3, rank 0, {fault.names}") as raised:
        edged.run([3])
    assert raised.value.suspect_from == 3
