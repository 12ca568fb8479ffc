"""Whatever can be known to be wrong with a chunk is known before its first byte is sent.

Pure: no device, no clock, no network. Rank0 runs it before it sends a header, the mesh leader
before it broadcasts to its group. What depends on earlier chunks is `lifecycle`'s business.
"""

from collections.abc import Mapping
from itertools import pairwise
from operator import attrgetter

from scope_contracts.envelope import (
    CONDITIONING_EMBEDS,
    CONTEXT_FRAMES_OVERRIDE,
    INPUT_LATENTS,
    INPUT_TENSORS,
    LATENTS_IN,
    RECOMPUTE_EMBEDS,
    MessageKind,
    PPEnvelope,
    shutdown_envelope,
)
from scope_contracts.errors import ContractError, PreflightError, mismatch, shown
from scope_contracts.geometry import ChunkGeometry
from scope_contracts.tensor_spec import TensorSpec
from scope_contracts.wire import encode

MAX_TIMESTEP = 1000.0
MAX_TENSOR_BYTES = 2**30
"""Far above any chunk; a receiver allocates what an envelope announces."""


def preflight(
    envelope: PPEnvelope, tensors: Mapping[str, TensorSpec], geometry: ChunkGeometry
) -> None:
    """Check an envelope against the tensors that would follow it; returns when all is well.

    `tensors` maps each tensor's name to the spec of the tensor in hand. Raises `PreflightError`
    naming field, got and want.
    """
    try:
        encode(envelope)
    except ContractError as error:
        raise PreflightError(str(error)) from error
    _check_announced(envelope, tensors)
    _check_not_negative(envelope)
    if envelope.kind is MessageKind.SHUTDOWN:
        _check_shutdown(envelope)
        return
    _check_scalars(envelope, geometry)
    if geometry.start_frame and envelope.chunk_index == 0:
        _check_start_frame(envelope)
    else:
        _check_steps(envelope)
    _check_calls(envelope)
    _check_hard_cut(envelope)
    _check_presence(envelope, tensors)
    _check_recompute(envelope, geometry)
    _check_shapes(envelope, tensors, geometry)


def _refusal(field: str, *, got: object, want: object, fix: str = "") -> PreflightError:
    """Made where a check has failed: its words cost more than all checks."""
    return PreflightError(mismatch(field, got=got, want=want, fix=fix))


def _check_announced(envelope: PPEnvelope, tensors: Mapping[str, TensorSpec]) -> None:
    for name, spec in tensors.items():
        if name not in INPUT_TENSORS:
            raise _refusal("tensors", got=name, want=f"only {INPUT_TENSORS}")
        if spec.name != name:
            raise _refusal("tensors", got=spec.name, want=name)
    in_hand = tuple(tensors[name] for name in INPUT_TENSORS if name in tensors)
    if envelope.tensors != in_hand:
        got, specs = ([str(spec) for spec in each] for each in (envelope.tensors, in_hand))
        want = f"the specs in hand, in this order: {shown(specs)}"
        raise _refusal("tensors", got=got, want=want)


def _check_not_negative(envelope: PPEnvelope) -> None:
    counts = _COUNTS_OF(envelope)
    if min(counts) < 0:
        name, count = next(each for each in zip(_COUNTS, counts, strict=True) if each[1] < 0)
        raise _refusal(name, got=count, want="at least 0")


def _check_shutdown(envelope: PPEnvelope) -> None:
    neutral = shutdown_envelope(
        plan_id=envelope.plan_id,
        call_id=envelope.call_id,
        chunk_index=envelope.chunk_index,
        cache_epoch=envelope.cache_epoch,
    )
    if envelope != neutral:
        fix = "build it with shutdown_envelope()"
        raise _refusal("kind", got=envelope.kind, want="no work beside it", fix=fix)


def _check_scalars(envelope: PPEnvelope, geometry: ChunkGeometry) -> None:
    bias = envelope.kv_cache_attention_bias
    if not 0 < bias <= 1:
        fix = "1.0 leaves past chunks as they are"
        raise _refusal("kv_cache_attention_bias", got=bias, want="0 < bias <= 1", fix=fix)
    multiple = geometry.pixel_multiple
    for name, pixels in (("height", envelope.height), ("width", envelope.width)):
        if pixels <= 0 or pixels % multiple:
            raise _refusal(name, got=pixels, want=f"a positive multiple of {multiple} pixels")


def _check_start_frame(envelope: PPEnvelope) -> None:
    """A picture is the first of its epoch, and is written into the cache by a clean pass alone."""
    where = "chunk 0 is the start frame"
    if num_steps := envelope.num_denoise_steps:
        raise _refusal("num_denoise_steps", got=num_steps, want=f"0: {where}")
    if steps := envelope.denoising_step_list:
        raise _refusal("denoising_step_list", got=steps, want=f"none: {where}")
    for name, bit in (("init_cache", envelope.init_cache), ("clean_pass", envelope.clean_pass)):
        if not bit:
            raise _refusal(name, got=bit, want=f"True: {where}")


def _check_steps(envelope: PPEnvelope) -> None:
    steps = envelope.denoising_step_list
    num_steps = envelope.num_denoise_steps
    if num_steps <= 0:
        fix = "only the start frame of a stream that begins with one has none"
        raise _refusal("num_denoise_steps", got=num_steps, want="at least 1", fix=fix)
    if len(steps) != num_steps:
        want = f"num_denoise_steps = {num_steps}"
        raise _refusal("denoising_step_list", got=f"{len(steps)} steps", want=want)
    falling = all(later < earlier for earlier, later in pairwise(steps))
    if not falling or steps[-1] < 0 or steps[0] > MAX_TIMESTEP:
        want = f"strictly falling timesteps in [0, {MAX_TIMESTEP:g}]"
        raise _refusal("denoising_step_list", got=steps, want=want)


def _check_calls(envelope: PPEnvelope) -> None:
    num_steps = envelope.num_denoise_steps
    calls = num_steps + envelope.clean_pass + envelope.do_kv_recompute
    if envelope.expected_generator_calls != calls:
        want = f"{calls} = num_denoise_steps + clean_pass + do_kv_recompute"
        got = envelope.expected_generator_calls
        raise _refusal("expected_generator_calls", got=got, want=want)


def _check_hard_cut(envelope: PPEnvelope) -> None:
    if not envelope.init_cache:
        return
    cut = "when init_cache is set"
    for name, bit in (
        ("reset_kv_cache", envelope.reset_kv_cache),
        ("reset_crossattn_cache", envelope.reset_crossattn_cache),
    ):
        if not bit:
            raise _refusal(name, got=bit, want=f"True {cut}")
    if start := envelope.current_start_frame:
        raise _refusal("current_start_frame", got=start, want=f"0 {cut}")
    if envelope.do_kv_recompute:
        raise _refusal("do_kv_recompute", got=True, want=f"False {cut}")


def _check_presence(envelope: PPEnvelope, tensors: Mapping[str, TensorSpec]) -> None:
    if LATENTS_IN not in tensors:
        raise _refusal(LATENTS_IN, got=list(tensors), want="it with every chunk")
    needs_text = envelope.init_cache or envelope.reset_crossattn_cache
    if needs_text and CONDITIONING_EMBEDS not in tensors:
        want = "it whenever init_cache or reset_crossattn_cache is set"
        raise _refusal(CONDITIONING_EMBEDS, got=list(tensors), want=want)
    given = CONTEXT_FRAMES_OVERRIDE in tensors
    if given != envelope.do_kv_recompute:
        raise _refusal(
            CONTEXT_FRAMES_OVERRIDE,
            got="it" if given else "nothing",
            want=f"it exactly when do_kv_recompute is set, here {envelope.do_kv_recompute}",
            fix="the mesh has no other source of context",
        )
    if RECOMPUTE_EMBEDS in tensors and not (envelope.do_kv_recompute and needs_text):
        want = "it only where do_kv_recompute and reset_crossattn_cache are set"
        raise _refusal(RECOMPUTE_EMBEDS, got=list(tensors), want=want)
    if INPUT_LATENTS in tensors and not envelope.num_denoise_steps:
        want = "it only with a chunk that is denoised"
        raise _refusal(INPUT_LATENTS, got=list(tensors), want=want)


def _check_recompute(envelope: PPEnvelope, geometry: ChunkGeometry) -> None:
    if not envelope.do_kv_recompute:
        return
    start = envelope.current_start_frame
    if start <= 0:
        want = "above 0: the first chunk of an epoch has no context"
        raise _refusal("current_start_frame with do_kv_recompute", got=start, want=want)
    if geometry.context_frames <= 0:
        raise _refusal("do_kv_recompute", got=True, want="a model whose cache can be rebuilt")


def _check_shapes(
    envelope: PPEnvelope, tensors: Mapping[str, TensorSpec], geometry: ChunkGeometry
) -> None:
    for name, spec in tensors.items():
        shape = _shape(name, envelope, geometry)
        if spec.shape != shape:
            raise _refusal(f"{name}.shape", got=spec.shape, want=shape)
        if spec.num_bytes > MAX_TENSOR_BYTES:
            want = f"at most {MAX_TENSOR_BYTES}, so a smaller picture"
            raise _refusal(f"{name} bytes", got=spec.num_bytes, want=want)
        if spec.dtype is not geometry.dtype:
            raise _refusal(f"{name}.dtype", got=str(spec.dtype), want=str(geometry.dtype))


def _shape(name: str, envelope: PPEnvelope, geometry: ChunkGeometry) -> tuple[int, ...]:
    """What the tensor `name` must have."""
    if name in (CONDITIONING_EMBEDS, RECOMPUTE_EMBEDS):
        return geometry.conditioning_shape
    if name in (LATENTS_IN, INPUT_LATENTS):
        return geometry.latent_shape(envelope.height, envelope.width)
    start = envelope.current_start_frame
    return geometry.context_shape(envelope.height, envelope.width, start_frame=start)


_COUNTS = ("call_id", "chunk_index", "cache_epoch", "current_start_frame", "base_seed")
_COUNTS_OF = attrgetter(*_COUNTS)
