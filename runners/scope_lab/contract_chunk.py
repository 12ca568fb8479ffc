"""A steady chunk of a real stream, with what its ranks hold when they run it."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from scope_contracts.cache_spec import CacheIndices
from scope_contracts.envelope import LATENTS_OUT, STATE_DIGEST, PPEnvelope, PPResult
from scope_contracts.geometry import ChunkGeometry
from scope_contracts.lifecycle import Lifecycle, StreamPosition
from scope_contracts.log_file import LogReader
from scope_contracts.log_records import Opened, Planned
from scope_contracts.parity import ScalarDigest
from scope_rt.control.chunk import Arrived, Chunk
from scope_rt.control.context import ContextMemory, anchor_encoder
from scope_rt.control.inbox import Conditioning
from scope_rt.control.planner import Planner, StreamSettings
from scope_rt.control.position import Position
from scope_rt.control.recompute import RecomputeAnchor
from scope_rt.models.loading import ModelFolder
from scope_rt.record.snapshot import StreamState
from scope_rt.session import StreamSession
from scope_rt.tensors import empty, specs_of

PROMPT = "a red circle and a blue square, medium, on navy"


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyChunk:
    """The third chunk of a stream; `lifecycle` stands before it, `state` behind it."""

    opened: Opened
    envelope: PPEnvelope
    tensors: dict[str, Tensor]
    chunk: Chunk
    result: PPResult
    answer: dict[str, Tensor]
    lifecycle: Lifecycle
    indices: CacheIndices
    geometry: ChunkGeometry
    state: StreamState

    @classmethod
    def of(cls, model: ModelFolder, folder: Path) -> "SteadyChunk":
        """Stream three chunks of `model`, with files in `folder`."""
        recording = folder / "steady.scope"
        with StreamSession(model.path, record=recording) as session:
            chunks = list(session.stream(PROMPT, num_chunks=3))
        with open(recording, "rb") as file:
            records = [entry.record for entry in LogReader(file)]
        opened = next(record for record in records if isinstance(record, Opened))
        envelope = [r.envelope for r in records if isinstance(r, Planned)][-1]
        latents = chunks[-1].latents[None]
        arrived = Arrived(
            envelope=envelope,
            prompt=PROMPT,
            latents=latents,
            generator_calls=envelope.expected_generator_calls,
            stage_ms=chunks[-1].stage_ms,
        )
        indices = CacheIndices(global_end_index=96, local_end_index=96)
        digest = ScalarDigest.of(envelope, indices).hash()
        answer = {
            LATENTS_OUT: latents,
            STATE_DIGEST: torch.frombuffer(bytearray(digest), dtype=torch.uint8),
        }
        return cls(
            opened=opened,
            envelope=envelope,
            tensors={spec.name: empty(spec).zero_() for spec in envelope.tensors},
            chunk=chunks[-1],
            result=PPResult(
                call_id=envelope.call_id,
                chunk_index=envelope.chunk_index,
                cache_epoch=envelope.cache_epoch,
                observed_generator_calls=envelope.expected_generator_calls,
                tensors=specs_of(answer),
                stage_ms=(("generate", 100.0),),
            ),
            answer=answer,
            lifecycle=_before(envelope, model.recipe.frames_per_block),
            indices=indices,
            geometry=model.geometry(dtype=torch.float32),
            state=_saved_state(model, opened, arrived),
        )


def _saved_state(model: ModelFolder, opened: Opened, last: Arrived) -> StreamState:
    """What rank0 saves when `last`, the third chunk, is not yet held by its consumer."""
    settings = StreamSettings(
        plan_id=opened.plan_id,
        recipe=model.recipe,
        height=opened.height,
        width=opened.width,
        base_seed=opened.base_seed,
    )
    codec = model.codec()
    decoder = codec.streaming_decoder()
    decoder.decode(last.latents)
    memory = ContextMemory(
        model.recipe,
        anchor=RecomputeAnchor.LATENT,
        encode_anchor=anchor_encoder(codec),
        first_latent_frames=codec.first_latent_frames,
        temporal_stride=codec.temporal_stride,
    )
    for _ in range(3):
        memory.remember_latents(last.latents)
    text = Conditioning(last.prompt, model.text_encoder()([last.prompt]))
    return StreamState(
        position=Position(planner=Planner(settings=settings), text=text),
        coming=(),
        num_held=2,
        unheld=(last,),
        decoder=decoder.state(),
        decoder_after=decoder.state(),
        memory=memory.state(),
    )


def _before(envelope: PPEnvelope, frames_per_block: int) -> Lifecycle:
    """Where a rank stands that is about to enter a steady chunk."""
    position = StreamPosition(
        call_id=envelope.call_id - 1,
        chunk_index=envelope.chunk_index - 1,
        cache_epoch=envelope.cache_epoch,
        next_start_frame=envelope.current_start_frame,
    )
    resumed = Lifecycle.resumed(
        plan_id=envelope.plan_id, frames_per_block=frames_per_block, position=position
    )
    return replace(resumed, holds_cache=True, cache_end_frame=envelope.current_start_frame)
