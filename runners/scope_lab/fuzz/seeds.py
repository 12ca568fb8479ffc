"""Legal messages and recordings of every kind, small; a fuzzer and tests of messages change them.

They continue each other: `ENVELOPES` are the first calls of one stream, in order.
"""

from dataclasses import replace

from scope_contracts.cache_spec import CacheIndices
from scope_contracts.envelope import (
    CONDITIONING_EMBEDS,
    CONTEXT_FRAMES_OVERRIDE,
    LATENTS_DIGEST,
    LATENTS_DIGEST_BYTES,
    LATENTS_IN,
    LATENTS_OUT,
    STATE_DIGEST,
    MessageKind,
    PlanId,
    PPEnvelope,
    PPResult,
    shutdown_envelope,
)
from scope_contracts.geometry import ChunkGeometry
from scope_contracts.lifecycle import Lifecycle, StreamPosition
from scope_contracts.log_file import pack
from scope_contracts.parity import HASH_BYTES, ParityKeys, ScalarDigest
from scope_contracts.tensor_spec import DType, TensorSpec
from scope_contracts.wire import encode
from scope_lab.sample_log import packed, planned, start_frame, story

GEOMETRY = ChunkGeometry(
    latent_channels=4,
    frames_per_block=3,
    text_len=6,
    text_dim=8,
    dtype=DType.FLOAT32,
    context_frames=5,
)
_LATENTS = TensorSpec(LATENTS_IN, DType.FLOAT32, (1, 3, 4, 2, 4))
_TEXT = TensorSpec(CONDITIONING_EMBEDS, DType.FLOAT32, (1, 6, 8))
_CONTEXT = TensorSpec(CONTEXT_FRAMES_OVERRIDE, DType.FLOAT32, (1, 5, 4, 2, 4))

FIRST = PPEnvelope(
    plan_id=PlanId.PP0,
    call_id=0,
    chunk_index=0,
    cache_epoch=0,
    kind=MessageKind.INFER,
    init_cache=True,
    reset_kv_cache=True,
    reset_crossattn_cache=True,
    current_start_frame=0,
    do_kv_recompute=False,
    clean_pass=True,
    num_denoise_steps=4,
    expected_generator_calls=5,
    kv_cache_attention_bias=1.0,
    denoising_step_list=(1000.0, 937.5, 833.25, 625.0),
    height=16,
    width=32,
    base_seed=7,
    tensors=(_LATENTS, _TEXT),
)
STEADY = replace(
    FIRST,
    call_id=1,
    chunk_index=1,
    init_cache=False,
    reset_kv_cache=False,
    reset_crossattn_cache=False,
    current_start_frame=3,
    kv_cache_attention_bias=0.3,
    tensors=(_LATENTS,),
)
_RECOMPUTE = replace(
    STEADY,
    call_id=2,
    chunk_index=2,
    current_start_frame=6,
    clean_pass=False,
    do_kv_recompute=True,
    tensors=(_LATENTS, _CONTEXT),
)
_REBUILT = replace(
    _RECOMPUTE,
    call_id=3,
    chunk_index=3,
    current_start_frame=9,
    clean_pass=True,
    reset_crossattn_cache=True,
    expected_generator_calls=6,
    tensors=(_LATENTS, _TEXT, _CONTEXT),
)
_CUT = replace(FIRST, call_id=4, chunk_index=6, cache_epoch=1, base_seed=2**63 - 1)
_SHUTDOWN = shutdown_envelope(plan_id=PlanId.PP0, call_id=5, chunk_index=6, cache_epoch=1)

ENVELOPES = (FIRST, STEADY, _RECOMPUTE, _REBUILT, _CUT, _SHUTDOWN)

_RESULT = PPResult(
    call_id=0,
    chunk_index=0,
    cache_epoch=0,
    observed_generator_calls=5,
    tensors=(
        TensorSpec(LATENTS_OUT, DType.FLOAT32, _LATENTS.shape),
        TensorSpec(STATE_DIGEST, DType.UINT8, (HASH_BYTES,)),
        TensorSpec(LATENTS_DIGEST, DType.UINT8, (LATENTS_DIGEST_BYTES,)),
    ),
    stage_ms=(("generate", 81.5),),
)
RESULTS = (
    _RESULT,
    replace(_RESULT, call_id=300, chunk_index=70_000, cache_epoch=2**40, stage_ms=()),
)

KEYS = ParityKeys(
    plan_id=PlanId.TP_V1_1,
    pp_enabled=False,
    kv_cache_recompute_every=1,
    kv_bias_backend="sdpa",
    recompute_anchor="decoded",
    tp_allow_compile=False,
    digest_every=64,
    input_digest=False,
    dtype=DType.FLOAT32,
    codec_dtype="float32",
    torch_version="2.13.0",
    package_version="0.1.0",
    model_fingerprint="ab12",
    world_layout="rank0+tp2",
    processor="AVX2",
)
DIGEST = ScalarDigest.of(_REBUILT, CacheIndices(global_end_index=16, local_end_index=16))

MESSAGES = tuple(encode(envelope) for envelope in ENVELOPES)
ANSWERS = tuple(encode(result) for result in RESULTS)


def lifecycles() -> tuple[Lifecycle, ...]:
    """Where a machine stands before each envelope, and where one does that was resumed."""
    machine = Lifecycle(plan_id=PlanId.PP0, frames_per_block=GEOMETRY.frames_per_block)
    stands = [machine]
    for envelope in ENVELOPES[:-1]:
        machine = machine.enter(envelope).commit(envelope.expected_generator_calls)
        stands.append(machine)
    position = StreamPosition(call_id=2, chunk_index=2, cache_epoch=0, next_start_frame=9)
    frames = GEOMETRY.frames_per_block
    resumed = Lifecycle.resumed(plan_id=PlanId.PP0, frames_per_block=frames, position=position)
    return (*stands, resumed)


def recordings() -> tuple[bytes, ...]:
    """Files: one that was opened, one that has begun with a picture, one of a whole stream, and one
    of a stream that crashed."""
    whole = story()
    torn = pack(planned(1))[:40]
    begun = packed([*whole[:2], start_frame()])
    return packed(whole[:1]), begun, packed(whole), packed(whole[:8]) + torn
