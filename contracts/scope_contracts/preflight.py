"""Whatever can be known to be wrong with a chunk is known before its first byte is sent.

Pure: no device, no clock, no network. Rank0 runs it before it sends a header, the mesh leader
before it broadcasts to its group. What depends on earlier chunks is `lifecycle`'s business.
"""

from collections.abc import Mapping
from itertools import pairwise

from scope_contracts.envelope import (
    CONDITIONING_EMBEDS,
    CONTEXT_FRAMES_OVERRIDE,
    INPUT_TENSORS,
    LATENTS_IN,
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
    _check_schedule(envelope)
    _check_hard_cut(envelope)
    _check_presence(envelope, tensors)
    _check_recompute(envelope, geometry)
    _check_shapes(envelope, tensors, geometry)


def _require(passed: bool, field: str, *, got: object, want: object, fix: str = "") -> None:
    if not passed:
        raise PreflightError(mismatch(field, got=got, want=want, fix=fix))


def _check_announced(envelope: PPEnvelope, tensors: Mapping[str, TensorSpec]) -> None:
    for name, spec in tensors.items():
        _require(name in INPUT_TENSORS, "tensors", got=name, want=f"only {INPUT_TENSORS}")
        _require(spec.name == name, "tensors", got=spec.name, want=name)
    in_hand = tuple(tensors[name] for name in INPUT_TENSORS if name in tensors)
    if envelope.tensors != in_hand:
        got, specs = ([str(spec) for spec in each] for each in (envelope.tensors, in_hand))
        want = f"the specs in hand, in this order: {shown(specs)}"
        raise PreflightError(mismatch("tensors", got=got, want=want))


def _check_not_negative(envelope: PPEnvelope) -> None:
    counts = {
        "call_id": envelope.call_id,
        "chunk_index": envelope.chunk_index,
        "cache_epoch": envelope.cache_epoch,
        "current_start_frame": envelope.current_start_frame,
        "base_seed": envelope.base_seed,
    }
    for name, count in counts.items():
        _require(count >= 0, name, got=count, want="at least 0")


def _check_shutdown(envelope: PPEnvelope) -> None:
    neutral = shutdown_envelope(
        plan_id=envelope.plan_id,
        call_id=envelope.call_id,
        chunk_index=envelope.chunk_index,
        cache_epoch=envelope.cache_epoch,
    )
    fix = "build it with shutdown_envelope()"
    _require(envelope == neutral, "kind", got=envelope.kind, want="no work beside it", fix=fix)


def _check_scalars(envelope: PPEnvelope, geometry: ChunkGeometry) -> None:
    bias = envelope.kv_cache_attention_bias
    fix = "1.0 leaves past chunks as they are"
    _require(0 < bias <= 1, "kv_cache_attention_bias", got=bias, want="0 < bias <= 1", fix=fix)
    multiple = geometry.pixel_multiple
    for name, pixels in (("height", envelope.height), ("width", envelope.width)):
        fits = pixels > 0 and pixels % multiple == 0
        _require(fits, name, got=pixels, want=f"a positive multiple of {multiple} pixels")


def _check_schedule(envelope: PPEnvelope) -> None:
    steps = envelope.denoising_step_list
    num_steps = envelope.num_denoise_steps
    _require(num_steps > 0, "num_denoise_steps", got=num_steps, want="at least 1")
    _require(
        len(steps) == num_steps,
        "denoising_step_list",
        got=f"{len(steps)} steps",
        want=f"num_denoise_steps = {num_steps}",
    )
    falling = all(later < earlier for earlier, later in pairwise(steps))
    in_range = steps[-1] > 0 and steps[0] <= MAX_TIMESTEP
    want = f"strictly falling timesteps in (0, {MAX_TIMESTEP:g}]"
    _require(falling and in_range, "denoising_step_list", got=steps, want=want)
    calls = num_steps + envelope.clean_pass + envelope.do_kv_recompute
    _require(
        envelope.expected_generator_calls == calls,
        "expected_generator_calls",
        got=envelope.expected_generator_calls,
        want=f"{calls} = num_denoise_steps + clean_pass + do_kv_recompute",
    )


def _check_hard_cut(envelope: PPEnvelope) -> None:
    if not envelope.init_cache:
        return
    cut = "when init_cache is set"
    for name, bit in (
        ("reset_kv_cache", envelope.reset_kv_cache),
        ("reset_crossattn_cache", envelope.reset_crossattn_cache),
    ):
        _require(bit, name, got=bit, want=f"True {cut}")
    start = envelope.current_start_frame
    _require(start == 0, "current_start_frame", got=start, want=f"0 {cut}")
    recompute = envelope.do_kv_recompute
    _require(not recompute, "do_kv_recompute", got=recompute, want=f"False {cut}")


def _check_presence(envelope: PPEnvelope, tensors: Mapping[str, TensorSpec]) -> None:
    names = list(tensors)
    _require(LATENTS_IN in tensors, LATENTS_IN, got=names, want="it with every chunk")
    if envelope.init_cache or envelope.reset_crossattn_cache:
        want = "it whenever init_cache or reset_crossattn_cache is set"
        _require(CONDITIONING_EMBEDS in tensors, CONDITIONING_EMBEDS, got=names, want=want)
    given = CONTEXT_FRAMES_OVERRIDE in tensors
    _require(
        given == envelope.do_kv_recompute,
        CONTEXT_FRAMES_OVERRIDE,
        got="it" if given else "nothing",
        want=f"it exactly when do_kv_recompute is set, here {envelope.do_kv_recompute}",
        fix="the mesh has no other source of context",
    )


def _check_recompute(envelope: PPEnvelope, geometry: ChunkGeometry) -> None:
    if not envelope.do_kv_recompute:
        return
    start = envelope.current_start_frame
    want = "above 0: the first chunk of an epoch has no context"
    _require(start > 0, "current_start_frame with do_kv_recompute", got=start, want=want)
    most = geometry.context_frames
    _require(most > 0, "do_kv_recompute", got=True, want="a model whose cache can be rebuilt")


def _check_shapes(
    envelope: PPEnvelope, tensors: Mapping[str, TensorSpec], geometry: ChunkGeometry
) -> None:
    size = (envelope.height, envelope.width)
    shapes = {
        LATENTS_IN: geometry.latent_shape(*size),
        CONDITIONING_EMBEDS: geometry.conditioning_shape,
        CONTEXT_FRAMES_OVERRIDE: geometry.context_shape(
            *size, start_frame=envelope.current_start_frame
        ),
    }
    for name, spec in tensors.items():
        _require(spec.shape == shapes[name], f"{name}.shape", got=spec.shape, want=shapes[name])
        most = f"at most {MAX_TENSOR_BYTES}, so a smaller picture"
        _require(spec.num_bytes <= MAX_TENSOR_BYTES, f"{name} bytes", got=spec.num_bytes, want=most)
        want = str(geometry.dtype)
        _require(spec.dtype is geometry.dtype, f"{name}.dtype", got=str(spec.dtype), want=want)
