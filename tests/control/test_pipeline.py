"""What was sent is answered in order, by the answer to it, or refused by name."""

import pytest
import torch

from scope_contracts.errors import CallCountError, OrderError, ParityError
from scope_contracts.log_records import Dropped, Planned
from scope_rt.control.inbox import Directive
from scope_rt.control.pipeline import Pipeline
from tests.control.memory_mesh import CUT, PROMPT, MemoryLog, MemoryMesh, pipeline_over


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        ({"call_id": 9}, OrderError),
        ({"cache_epoch": 7}, OrderError),
        ({"observed_generator_calls": 2}, CallCountError),
    ],
)
def test_an_answer_to_another_question_is_refused(
    spoil: dict[str, int], error: type[Exception]
) -> None:
    mesh = MemoryMesh()
    mesh.spoil = spoil
    pipeline = pipeline_over(mesh)
    pipeline.send(PROMPT)
    with pytest.raises(error):
        pipeline.receive()


def test_another_state_than_planned_is_refused() -> None:
    mesh = MemoryMesh()
    pipeline = pipeline_over(mesh)
    pipeline.send(PROMPT)
    pipeline.receive()
    mesh.ends[0] = 6
    pipeline.send(Directive())
    with pytest.raises(ParityError, match="chunk 1: the state digest"):
        pipeline.receive()


def test_another_text_than_planned_is_refused() -> None:
    mesh = MemoryMesh()
    pipeline = pipeline_over(mesh)
    pipeline.send(PROMPT)
    pipeline.receive()
    assert pipeline.midway_chunk is None
    mesh.text = "another"
    pipeline.send(Directive())
    with pytest.raises(ParityError, match="chunk 1: the state digest"):
        pipeline.receive()
    assert pipeline.midway_chunk == 1, "the mesh is not to be talked to any more"


def test_a_plan_that_is_refused_sends_and_advances_nothing() -> None:
    mesh, log = MemoryMesh(), MemoryLog()
    pipeline = pipeline_over(mesh, log=log)
    before = pipeline.position
    with pytest.raises(OrderError, match="the first chunk needs a prompt"):
        pipeline.send(Directive())
    assert pipeline.position is before
    assert (mesh.sent, log.records, list(pipeline.in_flight)) == ([], [], [])
    assert pipeline.midway_chunk is None


def state(pipeline: Pipeline) -> tuple[bool, bool, int]:
    return pipeline.has_room, pipeline.awaits_decode, pipeline.num_under_way


def test_a_chunk_keeps_its_place_until_it_is_delivered() -> None:
    pipeline = pipeline_over(MemoryMesh(), max_in_flight=2)
    pipeline.send(PROMPT)
    seen = [state(pipeline)]
    pipeline.send(Directive())
    seen.append(state(pipeline))
    pipeline.receive()
    seen.append(state(pipeline))
    pipeline.decoded(torch.zeros(1, 12, 1, 1, 3, dtype=torch.uint8))
    seen.append(state(pipeline))
    pipeline.delivered()
    seen.append(state(pipeline))
    assert seen == [
        (True, False, 1),
        (False, False, 2),
        (False, True, 2),
        (False, False, 1),
        (True, False, 1),
    ]


def test_what_a_hard_cut_ended_is_dropped_and_never_planned_again() -> None:
    log = MemoryLog()
    pipeline = pipeline_over(MemoryMesh(), max_in_flight=2, log=log)
    pipeline.send(PROMPT)
    pipeline.send(CUT)
    assert [sent.envelope.chunk_index for sent in pipeline.lost_by_a_restart] == [1]
    assert pipeline.receive() is None
    arrived = pipeline.receive()
    assert arrived is not None
    assert (arrived.envelope.chunk_index, arrived.envelope.cache_epoch) == (1, 1)
    assert [type(r) for r in log.records if isinstance(r, Planned | Dropped)] == [
        Planned,
        Planned,
        Dropped,
    ]


def test_a_rebuild_waits_until_everything_on_its_way_has_arrived() -> None:
    pipeline, rebuild = pipeline_over(MemoryMesh(), max_in_flight=2), Directive(recompute=True)
    pipeline.send(PROMPT)
    assert pipeline.must_wait(rebuild)
    assert not pipeline.must_wait(Directive())
    assert not pipeline.must_wait(CUT)
    pipeline.receive()
    assert not pipeline.must_wait(rebuild), "a latent anchor needs no decoded frame"


def test_closing_receives_what_is_under_way_first() -> None:
    mesh = MemoryMesh()
    pipeline = pipeline_over(mesh, max_in_flight=2)
    pipeline.send(PROMPT)
    pipeline.send(Directive())
    pipeline.close()
    assert mesh.ended
