"""What is told of a chunk of a stream, whichever process made it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from scope_contracts.log_records import Finished
from scope_contracts.retraction import Retraction
from scope_rt.control.chunk import Chunk
from scope_rt.control.log_entries import finished_record

GENERATE, ENCODE = "generate", "encode"
STAGES = ("plan", GENERATE, "wait", "decode", ENCODE, "digest")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRecord:
    """One emitted chunk: `frames` counts them, `stage_ms` is what each stage took."""

    chunk_index: int
    cache_epoch: int
    prompt: str
    latents_sha256: str
    frames: int
    generator_calls: int
    recomputed: bool
    kv_cache_attention_bias: float
    stage_ms: Mapping[str, float]
    is_suspect: bool = False
    """It was retracted, and none was made in its place."""

    @classmethod
    def of(cls, chunk: Chunk) -> "ChunkRecord":
        """A chunk of this process."""
        return cls.logged(finished_record(chunk, with_latents=False))

    @classmethod
    def logged(cls, finished: Finished) -> "ChunkRecord":
        """A chunk as its stream's log has it."""
        return cls(
            chunk_index=finished.chunk_index,
            cache_epoch=finished.cache_epoch,
            prompt=finished.prompt,
            latents_sha256=finished.latents_sha256,
            frames=finished.num_frames,
            generator_calls=finished.observed_generator_calls,
            recomputed=finished.recomputed,
            kv_cache_attention_bias=finished.kv_cache_attention_bias,
            stage_ms=dict(finished.stage_ms),
        )

    def judged(self, retractions: Sequence[Retraction]) -> "ChunkRecord":
        """The same chunk, after what was retracted."""
        covered = any(each.covers(self.chunk_index, self.cache_epoch) for each in retractions)
        return replace(self, is_suspect=covered)

    def encoded(self, encode_ms: float) -> "ChunkRecord":
        """The same chunk, with what writing it took; its stages in their order. One that a resume
        decoded again has not all of them."""
        stage_ms = {**self.stage_ms, ENCODE: encode_ms}
        ordered = {stage: stage_ms[stage] for stage in STAGES if stage in stage_ms}
        return replace(self, stage_ms=ordered)
