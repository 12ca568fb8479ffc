"""One envelope plans one chunk completely: no rank ever infers what another rank decided.

`PPEnvelope` goes from the planner to the generator ranks, `PPResult` comes back.
What each field means, its unit, who sets it and who checks it: contracts/README.md.
"""

from dataclasses import dataclass
from enum import StrEnum

from scope_contracts.tensor_spec import TensorSpec

ENVELOPE_VERSION = 1

LATENTS_IN = "latents_in"
CONDITIONING_EMBEDS = "conditioning_embeds"
CONTEXT_FRAMES_OVERRIDE = "context_frames_override"
RECOMPUTE_EMBEDS = "recompute_embeds"
INPUT_LATENTS = "input_latents"
LATENTS_OUT = "latents_out"
STATE_DIGEST = "state_digest"
LATENTS_DIGEST = "latents_digest"

INPUT_TENSORS = (
    LATENTS_IN,
    CONDITIONING_EMBEDS,
    CONTEXT_FRAMES_OVERRIDE,
    RECOMPUTE_EMBEDS,
    INPUT_LATENTS,
)
"""The tensors an envelope may announce, in the order they travel."""

OUTPUT_TENSORS = (LATENTS_OUT, STATE_DIGEST, LATENTS_DIGEST)
"""The tensors of a result, in the order they travel; `parity.state_hash` is the second, the
SHA-256 of the first one's bytes the third."""
LATENTS_DIGEST_BYTES = 32


class MessageKind(StrEnum):
    """What the receiver is asked to do."""

    INFER = "infer"
    SHUTDOWN = "shutdown"


class PlanId(StrEnum):
    """Which topology the ranks run; all of them must name the same one."""

    SINGLE = "single"
    TP_V0 = "tp_v0"
    TP_V1_1 = "tp_v1_1"
    PP0 = "pp0"
    PP1 = "pp1"


class Encodable:
    """A message that cannot change keeps its canonical bytes, once `wire.encode` has made them."""

    __slots__ = ("canonical",)
    canonical: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PPEnvelope(Encodable):
    """The plan of one chunk, and the specs of the tensors that follow it on the link."""

    pp_envelope_version: int = ENVELOPE_VERSION
    plan_id: PlanId
    call_id: int
    chunk_index: int
    cache_epoch: int
    kind: MessageKind
    init_cache: bool
    reset_kv_cache: bool
    reset_crossattn_cache: bool
    current_start_frame: int
    do_kv_recompute: bool
    clean_pass: bool
    num_denoise_steps: int
    expected_generator_calls: int
    kv_cache_attention_bias: float
    denoising_step_list: tuple[float, ...]
    height: int
    width: int
    base_seed: int
    tensors: tuple[TensorSpec, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PPResult(Encodable):
    """The answer to one envelope; dropped by rank0 when its `cache_epoch` is no longer current."""

    pp_envelope_version: int = ENVELOPE_VERSION
    call_id: int
    chunk_index: int
    cache_epoch: int
    observed_generator_calls: int
    tensors: tuple[TensorSpec, ...] = ()
    stage_ms: tuple[tuple[str, float], ...] = ()


def shutdown_envelope(
    *, plan_id: PlanId, call_id: int, chunk_index: int = 0, cache_epoch: int = 0
) -> PPEnvelope:
    """The one form of a shutdown: it repeats the last ids and carries no work."""
    return PPEnvelope(
        plan_id=plan_id,
        call_id=call_id,
        chunk_index=chunk_index,
        cache_epoch=cache_epoch,
        kind=MessageKind.SHUTDOWN,
        init_cache=False,
        reset_kv_cache=False,
        reset_crossattn_cache=False,
        current_start_frame=0,
        do_kv_recompute=False,
        clean_pass=False,
        num_denoise_steps=0,
        expected_generator_calls=0,
        kv_cache_attention_bias=1.0,
        denoising_step_list=(),
        height=0,
        width=0,
        base_seed=0,
    )
