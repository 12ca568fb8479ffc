"""A loop whose mesh, codec and log live in memory; not a test itself."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b

import torch
from torch import Tensor

from scope_contracts.cache_spec import KVCacheSpec
from scope_contracts.envelope import (
    CONDITIONING_EMBEDS,
    CONTEXT_FRAMES_OVERRIDE,
    LATENTS_DIGEST,
    LATENTS_IN,
    LATENTS_OUT,
    STATE_DIGEST,
    PlanId,
    PPEnvelope,
    PPResult,
)
from scope_contracts.geometry import ChunkGeometry
from scope_contracts.log_records import Record
from scope_contracts.parity import state_hash
from scope_contracts.tensor_spec import DType
from scope_rt.control.anchor import AnchorFrames
from scope_rt.control.context import ContextMemory
from scope_rt.control.inbox import Conditioning, Directive
from scope_rt.control.loop import StreamLoop
from scope_rt.control.pipeline import Pipeline
from scope_rt.control.planner import Planner, StreamSettings
from scope_rt.control.position import Position
from scope_rt.control.recompute import RecomputeAnchor
from scope_rt.control.resume_point import ResumePoint, ResumePoints
from scope_rt.control.stages import Stages
from scope_rt.instruments import Instruments
from scope_rt.models.noise import SeededNoise
from scope_rt.record.log import Log
from scope_rt.tensors import bytes_of, digest_of, sha256_of
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
SETTINGS = StreamSettings(plan_id=PlanId.PP1, recipe=RECIPE, height=16, width=16, base_seed=1)
PROMPT = Directive(conditioning=Conditioning("p", torch.zeros(1, 1, 1)))
CUT = Directive(hard_cut=True, drop_in_flight=True)
FIELD, STRIDE = 5, 4
"""Latent frames before a latent on which the pictures of `FieldDecoder` depend; frames of one."""


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
        digest = state_hash(envelope, indices, conditioning=self.text)
        state = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        result = PPResult(
            call_id=envelope.call_id,
            chunk_index=envelope.chunk_index,
            cache_epoch=envelope.cache_epoch,
            observed_generator_calls=envelope.expected_generator_calls,
        )
        self.contexts.append(tensors.get(CONTEXT_FRAMES_OVERRIDE))
        latents = tensors[LATENTS_IN]
        sha256 = torch.frombuffer(bytearray.fromhex(sha256_of(latents)), dtype=torch.uint8)
        out = {LATENTS_OUT: latents, STATE_DIGEST: state, LATENTS_DIGEST: sha256}
        self.answers.append((result, out))

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


class FieldDecoder:
    """Pictures that tell all they depend on: a latent frame and the `FIELD` before it.

    A frame holds how many latent frames of its epoch it has seen (`FIELD` + 1 at most) and two
    bytes of their digest.
    """

    def __init__(self) -> None:
        self._seen: list[Tensor] = []

    def decode(self, latents_BFCHW: Tensor) -> Tensor:
        frames = []
        for latent_BCHW in latents_BFCHW.unbind(1):
            self._seen = [*self._seen[-FIELD:], latent_BCHW]
            digest = blake2b(bytes_of(torch.stack(self._seen)), digest_size=2).digest()
            frames += [torch.tensor([len(self._seen), *digest], dtype=torch.uint8)] * STRIDE
        return torch.stack(frames)[None, :, None, None, :]

    def reset(self) -> None:
        self._seen = []


class MemoryLog:
    """Keeps the records; `failure` is set by the test."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.failure: str | None = None
        self.latents_failure: str | None = None

    @property
    def offset(self) -> int:
        """A record is a byte."""
        return len(self.records)

    def append(self, record: Record, blob: bytes = b"") -> None:
        if self.failure is None:
            self.records.append(record)

    def write_soon(self) -> None: ...

    def when_written(self, call: Callable[[int], None]) -> Callable[[], None]:
        return partial(call, self.offset) if self.failure is None else lambda: None

    def close(self) -> None: ...


@dataclass
class MemoryResumePoints:
    """Keeps every resume point with the log offset it was saved at."""

    saved: list[tuple[ResumePoint, int]] = field(default_factory=list)

    def begin(self, point: ResumePoint, *, log: Log) -> Callable[[], None]:
        self.saved.append((point, log.offset))
        return lambda: None

    @property
    def newest(self) -> ResumePoint:
        return self.saved[-1][0]


def stages_of(mesh: MemoryMesh) -> Stages:
    return Stages(
        mesh=mesh,
        context=ContextMemory(
            RECIPE,
            AnchorFrames(
                lambda frames: frames,
                num_latents=RECIPE.context_frames,
                first_latent_frames=STRIDE,
                temporal_stride=STRIDE,
            ),
            anchor=RecomputeAnchor.LATENT,
        ),
        geometry=GEOMETRY,
        noise=SeededNoise(),
        cache=CACHE,
    )


def loop_over(
    mesh: MemoryMesh,
    *,
    max_in_flight: int,
    resume_points: ResumePoints | None = None,
    log: Log | None = None,
    resumed: ResumePoint | None = None,
) -> StreamLoop:
    """A loop that shows `PROMPT`, or one that resumes."""
    loop = StreamLoop(
        Planner(settings=SETTINGS),
        stages_of(mesh),
        FieldDecoder(),
        max_in_flight=max_in_flight,
        num_tail_frames=max(FIELD, RECIPE.context_frames),
        log=log or MemoryLog(),
        record_latents=False,
        resume_points=resume_points,
        instruments=Instruments(),
        resumed=resumed,
    )
    if resumed is None:
        loop.inbox.post(PROMPT)
    return loop


def pipeline_over(
    mesh: MemoryMesh, *, max_in_flight: int = 1, log: MemoryLog | None = None
) -> Pipeline:
    return Pipeline(
        Position(planner=Planner(settings=SETTINGS)),
        stages_of(mesh),
        max_in_flight=max_in_flight,
        log=log or MemoryLog(),
        instruments=Instruments(),
    )
