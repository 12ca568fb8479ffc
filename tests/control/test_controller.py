"""The loop against a mesh that answers from memory: order, epochs, and what is never emitted."""

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from scope_contracts.cache_spec import KVCacheSpec
from scope_contracts.envelope import (
    CONDITIONING_EMBEDS,
    CONTEXT_FRAMES_OVERRIDE,
    LATENTS_IN,
    LATENTS_OUT,
    STATE_DIGEST,
    PlanId,
    PPEnvelope,
    PPResult,
)
from scope_contracts.errors import CallCountError, OrderError, ParityError, UserInputError
from scope_contracts.geometry import ChunkGeometry
from scope_contracts.parity import ScalarDigest
from scope_contracts.tensor_spec import DType
from scope_rt.control.chunk import Chunk
from scope_rt.control.context import ContextMemory
from scope_rt.control.controller import Controller, Stages
from scope_rt.control.inbox import Conditioning, Directive, ScheduledDirective
from scope_rt.control.planner import Planner, StreamSettings
from scope_rt.control.recompute import RecomputeAnchor
from scope_rt.control.recording import NullRecorder
from scope_rt.control.transition import Interpolation, TransitionSpec
from scope_rt.models.noise import SeededNoise
from scope_rt.record.snapshot import Checkpoint
from scope_rt.tensors import digest_of
from tests.tiny_folder import RECIPE

GEOMETRY = ChunkGeometry(
    latent_channels=2,
    frames_per_block=RECIPE.frames_per_block,
    text_len=1,
    text_dim=1,
    dtype=DType.FLOAT32,
    context_frames=RECIPE.context_frames,
)
CACHE = KVCacheSpec(
    num_layers=1,
    num_heads=1,
    head_dim=1,
    frame_tokens=1,
    sink_frames=RECIPE.sink_frames,
    window_frames=RECIPE.window_frames,
    batch=1,
    dtype=DType.FLOAT32,
)
CUT = Directive(hard_cut=True, drop_in_flight=True)


class MemoryMesh:
    """Answers every envelope with its own noise; `spoil` changes the next answer."""

    def __init__(self) -> None:
        self.sent: list[PPEnvelope] = []
        self.answers: deque[tuple[PPResult, dict[str, Tensor]]] = deque()
        self.contexts: list[Tensor | None] = []
        self.ends: dict[int, int] = {}
        self.text = ""
        self.spoil: dict[str, int] = {}
        self.ended = False

    def submit(self, envelope: PPEnvelope, tensors: Mapping[str, Tensor]) -> None:
        self.sent.append(envelope)
        self.ends[envelope.chunk_index] = self._end_frame(envelope)
        indices = CACHE.indices_at(self.ends[envelope.chunk_index])
        if CONDITIONING_EMBEDS in tensors:
            self.text = digest_of(tensors[CONDITIONING_EMBEDS])
        digest = ScalarDigest.of(envelope, indices, conditioning=self.text).hash()
        state = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        result = PPResult(
            call_id=envelope.call_id,
            chunk_index=envelope.chunk_index,
            cache_epoch=envelope.cache_epoch,
            observed_generator_calls=envelope.expected_generator_calls,
        )
        self.contexts.append(tensors.get(CONTEXT_FRAMES_OVERRIDE))
        self.answers.append((result, {LATENTS_OUT: tensors[LATENTS_IN], STATE_DIGEST: state}))

    def _end_frame(self, envelope: PPEnvelope) -> int:
        """Where the cache ends after the chunk, as a ring would have it."""
        block = RECIPE.frames_per_block
        if envelope.do_kv_recompute:
            return min(RECIPE.context_frames, envelope.current_start_frame) + block
        return block if envelope.init_cache else self.ends[envelope.chunk_index - 1] + block

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

    def state(self) -> dict[str, Tensor]:
        return {"chunks": torch.tensor(self.chunks_of_epoch)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self.chunks_of_epoch = int(state["chunks"])


SETTINGS = StreamSettings(plan_id=PlanId.PP1, recipe=RECIPE, height=16, width=16, base_seed=1)


def controller(
    mesh: MemoryMesh, *, max_in_flight: int, checkpoint: Checkpoint | None = None
) -> Controller:
    stages = Stages(
        mesh=mesh,
        decoder=CountingDecoder(),
        memory=ContextMemory(
            RECIPE,
            anchor=RecomputeAnchor.LATENT,
            encode_anchor=lambda frames: frames,
            first_latent_frames=1,
            temporal_stride=4,
        ),
        geometry=GEOMETRY,
        noise=SeededNoise(),
        cache=CACHE,
    )
    made = Controller(
        Planner(settings=SETTINGS),
        stages,
        max_in_flight=max_in_flight,
        recorder=NullRecorder(),
        checkpoint=checkpoint,
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


def resumed(path: Path, mesh: MemoryMesh, *, max_in_flight: int) -> Controller:
    checkpoint = Checkpoint(path, {"seed": 1})
    state = checkpoint.load(SETTINGS)
    assert state is not None
    loop = controller(mesh, max_in_flight=max_in_flight, checkpoint=checkpoint)
    loop.resume(state)
    loop.inbox.take(0).acknowledge(0, 0)  # the prompt that `controller` posts
    loop.inbox.schedule(state.coming)
    return loop


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
@pytest.mark.parametrize("num_shown", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("num_behind", [0, 1, 2])
def test_a_stream_that_was_lost_goes_on_without_repeating_or_missing_a_chunk(
    tmp_path: Path, max_in_flight: int, num_shown: int, num_behind: int
) -> None:
    """The consumer holds `num_behind` chunks less than it was shown when everything is lost."""
    cuts = [ScheduledDirective(chunk_index=4, directive=Directive(hard_cut=True))]
    whole = controller(MemoryMesh(), max_in_flight=max_in_flight)
    whole.inbox.schedule(cuts)
    want = list(whole.run(8))

    held = max(0, num_shown - num_behind)
    loop = controller(
        MemoryMesh(),
        max_in_flight=max_in_flight,
        checkpoint=Checkpoint(tmp_path / "c", {"seed": 1}),
    )
    loop.inbox.schedule(cuts)
    count = 0
    stream = loop.run(8, num_held=lambda: max(0, count - num_behind))
    kept: list[Chunk] = []
    for chunk in stream:
        kept.append(chunk)
        count += 1
        if count == num_shown:
            break

    mesh = MemoryMesh()
    mesh.ends = {index: 3 * index + 3 for index in range(8)}
    again = list(
        resumed(tmp_path / "c", mesh, max_in_flight=max_in_flight).run(8, num_held=lambda: held)
    )
    got = [*kept[:held], *again]
    assert [c.chunk_index for c in got] == list(range(8))
    assert [c.cache_epoch for c in got] == [c.cache_epoch for c in want]
    assert [c.latents_sha256 for c in got] == [c.latents_sha256 for c in want]
    assert [c.frames[0, 0, 0, 0] for c in got] == [c.frames[0, 0, 0, 0] for c in want]
    assert mesh.sent == [] or mesh.sent[0].do_kv_recompute or mesh.sent[0].init_cache


def test_a_checkpoint_of_another_stream_is_refused(tmp_path: Path) -> None:
    loop = controller(
        MemoryMesh(), max_in_flight=1, checkpoint=Checkpoint(tmp_path / "c", {"seed": 1})
    )
    next(loop.run(2))
    with pytest.raises(UserInputError, match="seed 1, this one has 2"):
        Checkpoint(tmp_path / "c", {"seed": 2}).load(SETTINGS)
    (tmp_path / "c").write_bytes(b"\x93")
    with pytest.raises(UserInputError, match="is damaged; delete"):
        Checkpoint(tmp_path / "c", {"seed": 1}).load(SETTINGS)


def test_a_rebuild_waits_for_the_chunks_it_needs() -> None:
    mesh = MemoryMesh()
    loop = controller(mesh, max_in_flight=2)
    rebuild = ScheduledDirective(chunk_index=2, directive=Directive(recompute=True))
    loop.inbox.schedule([rebuild])
    stream = loop.run(5)
    emitted = []
    for chunk in stream:
        emitted.append(chunk)
        assert len(mesh.sent) <= len(emitted) + 2
    context = mesh.contexts[2]
    assert context is not None
    before = torch.cat([c.latents for c in emitted[:2]])
    num_recent = RECIPE.context_frames - RECIPE.sink_frames
    want = torch.cat([before[: RECIPE.sink_frames], before[-num_recent:]])
    assert torch.equal(context[0], want)
    assert [c.recomputed for c in emitted] == [False, False, True, False, False]


def test_another_state_than_planned_is_refused() -> None:
    mesh = MemoryMesh()
    mesh.ends[0] = 0
    loop = controller(mesh, max_in_flight=1)
    stream = loop.run(3)
    next(stream)
    mesh.ends[0] = 6
    with pytest.raises(ParityError, match="chunk 1: the state digest"):
        next(stream)


def test_another_text_than_planned_is_refused() -> None:
    mesh = MemoryMesh()
    loop = controller(mesh, max_in_flight=1)
    stream = loop.run(3)
    next(stream)
    mesh.text = "another"
    with pytest.raises(ParityError, match="chunk 1: the state digest"):
        next(stream)
    assert loop.is_midway, "the mesh is not to be talked to any more"


def test_a_consumer_behind_the_checkpoint_is_refused(tmp_path: Path) -> None:
    loop = controller(
        MemoryMesh(), max_in_flight=1, checkpoint=Checkpoint(tmp_path / "c", {"seed": 1})
    )
    stream = loop.run(8)
    for _ in range(4):
        next(stream)
    again = resumed(tmp_path / "c", MemoryMesh(), max_in_flight=1)
    with pytest.raises(UserInputError, match=r"holds 0 chunks, the checkpoint .* goes on after 3"):
        next(again.run(8, num_held=lambda: 0))


def test_what_was_acknowledged_outlives_the_process(tmp_path: Path) -> None:
    loop = controller(
        MemoryMesh(), max_in_flight=1, checkpoint=Checkpoint(tmp_path / "c", {"seed": 1})
    )
    stream = loop.run(8)
    next(stream)
    receipt = loop.inbox.post(Directive(conditioning=Conditioning("q", torch.ones(1, 1, 1))))
    loop._fill(8)  # planned and sent; then everything is lost
    ack = receipt.wait(0)
    assert ack is not None
    state = Checkpoint(tmp_path / "c", {"seed": 1}).load(SETTINGS)
    assert state is not None
    (kept,) = [event for event in state.coming if event.chunk_index == ack.chunk_index]
    assert kept.directive.conditioning is not None
    assert kept.directive.conditioning.prompt == "q"


def test_a_cut_need_not_wait_for_the_context_of_what_it_cuts_off() -> None:
    mesh = MemoryMesh()
    loop = controller(mesh, max_in_flight=2)
    loop.inbox.schedule([ScheduledDirective(chunk_index=2, directive=Directive(recompute=True))])
    stream = loop.run(4)
    emitted = [next(stream)]
    loop.inbox.post(CUT)
    emitted += list(stream)
    assert [(c.chunk_index, c.cache_epoch) for c in emitted] == [(0, 0), (2, 1), (3, 1), (4, 1)]


def test_control_input_is_acknowledged_with_the_chunk_that_has_it() -> None:
    loop = controller(MemoryMesh(), max_in_flight=2)
    stream = loop.run(6)
    next(stream)
    receipt = loop.inbox.post(Directive(conditioning=Conditioning("q", torch.ones(1, 1, 1))))
    chunks = list(stream)
    ack = receipt.wait(0)
    assert ack is not None
    assert [c.prompt for c in chunks] == ["p"] * (ack.chunk_index - 1) + ["q"] * (
        6 - ack.chunk_index
    )


def test_a_soft_transition_changes_text_and_bias_and_no_cache() -> None:
    mesh = MemoryMesh()
    loop = controller(mesh, max_in_flight=1)
    stream = loop.run(6)
    next(stream)
    spec = TransitionSpec(num_chunks=3, method=Interpolation.LERP, bias_floor=0.2)
    text = Conditioning("q", torch.ones(1, 1, 1))
    loop.inbox.post(Directive(conditioning=text, transition=spec))
    list(stream)
    assert [e.reset_crossattn_cache for e in mesh.sent] == [True, True, True, True, False, False]
    assert [e.kv_cache_attention_bias < 1 for e in mesh.sent] == [0, 1, 1, 0, 0, 0]
    assert not any(e.reset_kv_cache for e in mesh.sent[1:])
