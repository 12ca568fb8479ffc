"""The loop against a mesh that answers from memory: order, epochs, and what is never emitted."""

from collections import deque
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from scope_contracts.envelope import LATENTS_IN, LATENTS_OUT, PlanId, PPEnvelope, PPResult
from scope_contracts.errors import CallCountError, OrderError
from scope_contracts.geometry import ChunkGeometry
from scope_contracts.tensor_spec import DType
from scope_rt.control.controller import Controller
from scope_rt.control.inbox import Conditioning, Directive, ScheduledDirective
from scope_rt.control.planner import Planner, StreamSettings
from scope_rt.models.noise import SeededNoise
from scope_rt.streaming.trace import NullTrace
from tests.tiny_folder import RECIPE

GEOMETRY = ChunkGeometry(
    latent_channels=2,
    frames_per_block=RECIPE.frames_per_block,
    text_len=1,
    text_dim=1,
    dtype=DType.FLOAT32,
    context_frames=6,
)
CUT = Directive(hard_cut=True, drop_in_flight=True)


class MemoryMesh:
    """Answers every envelope with its own noise; `spoil` changes the next answer."""

    def __init__(self) -> None:
        self.sent: list[PPEnvelope] = []
        self.answers: deque[tuple[PPResult, dict[str, Tensor]]] = deque()
        self.spoil: dict[str, int] = {}
        self.ended = False

    def submit(self, envelope: PPEnvelope, tensors: Mapping[str, Tensor]) -> None:
        self.sent.append(envelope)
        result = PPResult(
            call_id=envelope.call_id,
            chunk_index=envelope.chunk_index,
            cache_epoch=envelope.cache_epoch,
            observed_generator_calls=envelope.expected_generator_calls,
        )
        self.answers.append((result, {LATENTS_OUT: tensors[LATENTS_IN]}))

    def collect(self) -> tuple[PPResult, dict[str, Tensor]]:
        result, tensors = self.answers.popleft()
        return replace(result, **self.spoil), tensors  # type: ignore[arg-type]

    def shutdown(self, envelope: PPEnvelope) -> None:
        assert not self.answers, "told to end while something was under way"
        self.ended = True


class CountingDecoder:
    """Decodes nothing; knows how many chunks of this epoch it has seen."""

    def __init__(self) -> None:
        self.chunks_of_epoch = 0

    def decode(self, latents_BFCHW: Tensor) -> Tensor:
        self.chunks_of_epoch += 1
        return torch.full((1, 12, 1, 1, 3), self.chunks_of_epoch, dtype=torch.uint8)

    def reset(self) -> None:
        self.chunks_of_epoch = 0


def controller(mesh: MemoryMesh, *, max_in_flight: int) -> Controller:
    settings = StreamSettings(plan_id=PlanId.PP1, recipe=RECIPE, height=16, width=16, base_seed=1)
    made = Controller(
        planner=Planner(settings=settings),
        mesh=mesh,
        decoder=CountingDecoder(),
        geometry=GEOMETRY,
        noise=SeededNoise(),
        trace=NullTrace(),
        max_in_flight=max_in_flight,
    )
    made.inbox.post(Directive(conditioning=Conditioning("p", torch.zeros(1, 1, 1))))
    return made


def test_late_result_after_hard_cut_is_never_emitted() -> None:
    loop = controller(MemoryMesh(), max_in_flight=2)
    stream = loop.run(5)
    emitted = [next(stream)]
    loop.inbox.post(CUT)  # chunk 1 is under way and belongs to the old epoch
    emitted += list(stream)
    assert [(c.chunk_index, c.cache_epoch) for c in emitted] == [
        (0, 0),
        (2, 1),
        (3, 1),
        (4, 1),
        (5, 1),
    ]
    assert [int(c.frames[0, 0, 0, 0]) for c in emitted] == [1, 1, 2, 3, 4], "decoder saw a late one"


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_scheduled_cut_drops_nothing(max_in_flight: int) -> None:
    loop = controller(MemoryMesh(), max_in_flight=max_in_flight)
    cut = ScheduledDirective(chunk_index=2, directive=Directive(hard_cut=True))
    loop.inbox.schedule([cut])
    emitted = [(c.chunk_index, c.cache_epoch) for c in loop.run(4)]
    assert emitted == [(0, 0), (1, 0), (2, 1), (3, 1)]


def test_pipeline_sends_the_next_chunk_before_it_waits() -> None:
    mesh = MemoryMesh()
    stream = controller(mesh, max_in_flight=2).run(4)
    assert next(stream).chunk_index == 0
    assert len(mesh.sent) == 2
    list(stream)
    assert len(mesh.sent) == 4, "chunks beyond the end were planned"


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
    with pytest.raises(error):
        next(controller(mesh, max_in_flight=1).run(1))


def test_close_receives_what_is_under_way_first() -> None:
    mesh = MemoryMesh()
    loop = controller(mesh, max_in_flight=2)
    next(loop.run(9))
    loop.close()
    assert mesh.ended


def test_of_two_overdue_events_the_later_wins() -> None:
    loop = controller(MemoryMesh(), max_in_flight=1)
    events = [
        ScheduledDirective(
            chunk_index=index,
            directive=Directive(conditioning=Conditioning(prompt, torch.zeros(1, 1, 1))),
        )
        for index, prompt in [(0, "older"), (1, "newer")]
    ]
    loop.inbox.schedule(events)
    taken = loop.inbox.take(1).conditioning
    assert taken is not None
    assert taken.prompt == "p", "what a person asks for now wins over a plan"
    loop.inbox.schedule(events)
    taken = loop.inbox.take(1).conditioning
    assert taken is not None
    assert taken.prompt == "newer"
