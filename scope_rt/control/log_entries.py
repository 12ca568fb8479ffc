"""What rank0 does, as records of the stream log; and what was asked for, from them."""

import time
from dataclasses import replace

import torch

from scope_contracts.envelope import LATENTS_IN, LATENTS_OUT, PPEnvelope
from scope_contracts.errors import FieldError, mismatch
from scope_contracts.log_records import (
    UNCHANGED,
    Control,
    Dropped,
    Failed,
    Finished,
    Planned,
    Retracted,
    Scheduled,
)
from scope_contracts.log_records import StartFrame as StartFrameRecord
from scope_contracts.retraction import Retraction
from scope_rt.control.chunk import Chunk
from scope_rt.control.inbox import Directive
from scope_rt.control.start_frame import StartFrame
from scope_rt.control.transition import Interpolation, TransitionSpec
from scope_rt.tensors import TORCH_DTYPES, spec_of

_MOST_CHARACTERS = 4096


def control_records(chunk_index: int, directive: Directive) -> tuple[Control, ...]:
    """What a person asked for takes effect at `chunk_index`; an empty directive is no record."""
    text, transition = directive.conditioning, directive.transition
    if directive == Directive():
        return ()
    return (
        Control(
            at_s=time.time(),
            chunk_index=chunk_index,
            prompt="" if text is None else text.prompt,
            embeds_sha256="" if text is None else text.embeds_sha256,
            hard_cut=directive.hard_cut,
            drop_in_flight=directive.drop_in_flight,
            transition_num_chunks=0 if transition is None else transition.num_chunks,
            transition_method="" if transition is None else str(transition.method),
            transition_bias_floor=1.0 if transition is None else transition.bias_floor,
            recompute=directive.recompute,
            kv_cache_attention_bias=directive.bias or 0.0,
            base_seed=UNCHANGED if directive.seed is None else directive.seed,
            command_ids=directive.command_ids,
        ),
    )


def recorded_transition(record: Control | Scheduled) -> TransitionSpec | None:
    """The soft transition that was asked for.

    Raises:
        FieldError: its method is one that this version does not know.
    """
    if not record.transition_num_chunks:
        return None
    if record.transition_method not in list(Interpolation):
        want = f"one of {', '.join(Interpolation)}"
        raise FieldError(mismatch("transition_method", got=record.transition_method, want=want))
    return TransitionSpec(
        num_chunks=record.transition_num_chunks,
        method=Interpolation(record.transition_method),
        bias_floor=record.transition_bias_floor,
    )


def recorded_bias(record: Control) -> float | None:
    """The resting bias that was asked for; None where none was."""
    return record.kv_cache_attention_bias or None


def recorded_seed(record: Control) -> int | None:
    """The base seed that was asked for; None where none was."""
    return None if record.base_seed == UNCHANGED else record.base_seed


def planned_record(envelope: PPEnvelope) -> Planned:
    """`envelope` passed all checks and is about to be sent."""
    return Planned(at_s=time.time(), envelope=envelope)


def start_frame_record(frame: StartFrame) -> StartFrameRecord:
    """Chunk 0 will be `frame`; the record's blob is its latents."""
    return StartFrameRecord(
        at_s=time.time(),
        image=recordable(frame.image),
        image_sha256=frame.image_sha256,
        latents=spec_of(LATENTS_IN, frame.latents),
        latents_sha256=frame.latents_sha256,
    )


def recorded_start_frame(record: StartFrameRecord, blob: bytes) -> StartFrame:
    """The inverse, of the record and its blob."""
    spec = record.latents
    return StartFrame(
        image=record.image,
        image_sha256=record.image_sha256,
        latents=torch.frombuffer(bytearray(blob), dtype=TORCH_DTYPES[spec.dtype]).view(spec.shape),
        latents_sha256=record.latents_sha256,
    )


def finished_record(chunk: Chunk, *, with_latents: bool) -> Finished:
    """`chunk` was decoded for the consumer."""
    return Finished(
        at_s=time.time(),
        chunk_index=chunk.chunk_index,
        cache_epoch=chunk.cache_epoch,
        prompt=chunk.prompt,
        num_frames=len(chunk.frames),
        observed_generator_calls=chunk.generator_calls,
        recomputed=chunk.recomputed,
        kv_cache_attention_bias=chunk.kv_cache_attention_bias,
        latents_sha256=chunk.latents_sha256,
        latents=spec_of(LATENTS_OUT, chunk.latents) if with_latents else None,
        stage_ms=tuple(chunk.stage_ms.items()),
    )


def dropped_record(envelope: PPEnvelope) -> Dropped:
    """The chunk of `envelope` came after a hard cut had ended its epoch."""
    return Dropped(
        at_s=time.time(), chunk_index=envelope.chunk_index, cache_epoch=envelope.cache_epoch
    )


def retracted_record(retraction: Retraction) -> Retracted:
    """Chunks that were shown are suspect."""
    reason = recordable(retraction.reason)
    return Retracted(at_s=time.time(), retraction=replace(retraction, reason=reason))


def failed_record(chunk_index: int, error: BaseException) -> Failed:
    """`error` ends the stream after `chunk_index` was planned."""
    text = recordable(f"{type(error).__name__}: {error}")
    return Failed(at_s=time.time(), chunk_index=chunk_index, error=text)


def recordable(text: str) -> str:
    """As a record has it: short, and characters alone, which the name of a file may lack."""
    return text[:_MOST_CHARACTERS].encode(errors="replace").decode()
