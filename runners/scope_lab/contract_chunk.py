"""A steady chunk of a real stream, with what its ranks hold when they run it."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from scope_contracts.cache_spec import CacheIndices
from scope_contracts.envelope import LATENTS_DIGEST, LATENTS_OUT, STATE_DIGEST, PPEnvelope, PPResult
from scope_contracts.lifecycle import Lifecycle, StreamPosition
from scope_contracts.log_file import LogReader
from scope_contracts.log_records import Opened, Planned
from scope_contracts.parity import state_hash
from scope_rt.config import StreamConfig
from scope_rt.control.chunk import Chunk
from scope_rt.control.resume_point import ResumePoint
from scope_rt.record.snapshot import SnapshotStore
from scope_rt.record.snapshot_header import SnapshotHeader
from scope_rt.session import StreamSession
from scope_rt.stream_setup import StreamSetup
from scope_rt.tensors import empty, specs_of

PROMPT = "a red circle and a blue square, medium, on navy"


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyChunk:
    """The third chunk of a stream; `lifecycle` is as before it, `resume_point` as after it."""

    setup: StreamSetup
    opened: Opened
    envelope: PPEnvelope
    tensors: dict[str, Tensor]
    chunk: Chunk
    result: PPResult
    answer: dict[str, Tensor]
    lifecycle: Lifecycle
    indices: CacheIndices
    header: SnapshotHeader
    resume_point: ResumePoint

    @classmethod
    def of(cls, config: StreamConfig, folder: Path) -> "SteadyChunk":
        """Stream three chunks of `config`, with files in `folder`."""
        log, snapshot = folder / "steady.scope", folder / "steady.snapshot"
        with StreamSession(config.with_settings(log=log, snapshot=snapshot)) as session:
            chunks = list(session.stream(PROMPT, num_chunks=3))
        saved = SnapshotStore(snapshot).load(ResumePoint)
        assert saved is not None, "every chunk saves one"
        header, resume_point = saved
        with open(log, "rb") as file:
            records = [entry.record for entry in LogReader(file)]
        opened = next(record for record in records if isinstance(record, Opened))
        envelope = [r.envelope for r in records if isinstance(r, Planned)][-1]
        indices = CacheIndices(global_end_index=96, local_end_index=96)
        digest = state_hash(envelope, indices)
        answer = {
            LATENTS_OUT: chunks[-1].latents[None],
            STATE_DIGEST: torch.frombuffer(bytearray(digest), dtype=torch.uint8),
            LATENTS_DIGEST: torch.frombuffer(
                bytearray.fromhex(chunks[-1].latents_sha256), dtype=torch.uint8
            ),
        }
        return cls(
            setup=session.setup,
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
            lifecycle=_before(envelope, session.setup.recipe.frames_per_block),
            indices=indices,
            header=header,
            resume_point=resume_point,
        )


def _before(envelope: PPEnvelope, frames_per_block: int) -> Lifecycle:
    """The lifecycle of a rank that is about to enter a steady chunk."""
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
