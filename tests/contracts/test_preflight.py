"""Every wrong chunk is refused with its field named, before a byte could leave."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from scope_contracts import (
    CONDITIONING_EMBEDS,
    CONTEXT_FRAMES_OVERRIDE,
    LATENTS_IN,
    RECOMPUTE_EMBEDS,
    ChunkGeometry,
    DType,
    MessageKind,
    PlanId,
    PPEnvelope,
    PreflightError,
    TensorSpec,
    preflight,
    shutdown_envelope,
)

MakeEnvelope = Callable[..., PPEnvelope]


def in_hand(envelope: PPEnvelope) -> Mapping[str, TensorSpec]:
    return {spec.name: spec for spec in envelope.tensors}


@pytest.mark.parametrize("chunk", ["first", "steady", "recompute", "rebuilt"])
def test_a_legal_chunk_passes(
    make_envelope: MakeEnvelope, geometry: ChunkGeometry, chunk: str
) -> None:
    envelope = make_envelope(chunk)
    preflight(envelope, in_hand(envelope), geometry)


SCALARS = [
    ("first", {"pp_envelope_version": 2}, "pp_envelope_version: got 2, want 1"),
    ("first", {"kind": "infer"}, "kind"),
    ("first", {"call_id": -1}, "call_id: got -1"),
    ("first", {"chunk_index": -1}, "chunk_index: got -1"),
    ("first", {"cache_epoch": -1}, "cache_epoch: got -1"),
    ("first", {"base_seed": -1}, "base_seed: got -1"),
    ("steady", {"current_start_frame": -3}, "current_start_frame: got -3"),
    ("steady", {"kv_cache_attention_bias": 0.0}, "kv_cache_attention_bias: got 0.0"),
    ("steady", {"kv_cache_attention_bias": 1.5}, "kv_cache_attention_bias: got 1.5"),
    ("steady", {"kv_cache_attention_bias": float("nan")}, "kv_cache_attention_bias: got nan"),
    ("steady", {"height": 72}, "height: got 72, want a positive multiple of 16"),
    ("steady", {"width": 0}, "width: got 0"),
    ("steady", {"width": -16}, "width: got -16"),
    ("steady", {"num_denoise_steps": 3}, "denoising_step_list: got '4 steps'"),
    ("steady", {"num_denoise_steps": 0}, "num_denoise_steps: got 0"),
    ("steady", {"denoising_step_list": (9.0, 9.0, 8.0, 7.0)}, "strictly falling"),
    ("steady", {"denoising_step_list": (1001.0, 9.0, 8.0, 7.0)}, "strictly falling"),
    ("steady", {"denoising_step_list": (9.0, 8.0, 7.0, -1.0)}, "strictly falling"),
    ("steady", {"expected_generator_calls": 4}, "expected_generator_calls: got 4, want 5"),
    ("steady", {"clean_pass": False}, "expected_generator_calls: got 5, want 4"),
    ("recompute", {"clean_pass": True}, "expected_generator_calls: got 5, want 6"),
    ("rebuilt", {"clean_pass": False}, "expected_generator_calls: got 6, want 5"),
    (
        "recompute",
        {"current_start_frame": 0},
        "current_start_frame with do_kv_recompute: got 0, want above 0",
    ),
    ("first", {"reset_kv_cache": False}, "reset_kv_cache: got False, want True when init_cache"),
    ("first", {"reset_crossattn_cache": False}, "reset_crossattn_cache: got False"),
    ("first", {"current_start_frame": 3}, "current_start_frame: got 3, want 0 when init_cache"),
    (
        "first",
        {"clean_pass": False, "do_kv_recompute": True},
        "do_kv_recompute: got True, want False when init_cache",
    ),
]


@pytest.mark.parametrize(("chunk", "changes", "message"), SCALARS)
def test_a_wrong_scalar_is_refused(
    make_envelope: MakeEnvelope,
    geometry: ChunkGeometry,
    chunk: str,
    changes: dict[str, Any],
    message: str,
) -> None:
    envelope = make_envelope(chunk, **changes)
    with pytest.raises(PreflightError, match=re.escape(message)):
        preflight(envelope, in_hand(envelope), geometry)


def begins_with_a_picture(geometry: ChunkGeometry) -> ChunkGeometry:
    return replace(geometry, frames_per_block=1, start_frame=True)


def test_a_start_frame_passes_where_the_stream_begins_with_one(
    make_envelope: MakeEnvelope, geometry: ChunkGeometry
) -> None:
    envelope = make_envelope("start_frame")
    preflight(envelope, in_hand(envelope), begins_with_a_picture(geometry))
    later = replace(make_envelope("first"), chunk_index=4, tensors=envelope.tensors)
    preflight(later, in_hand(later), begins_with_a_picture(geometry))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_denoise_steps": 4}, "num_denoise_steps: got 4, want 0: chunk 0 is the start frame"),
        ({"denoising_step_list": (9.0,)}, "want none: chunk 0 is the start frame"),
        ({"clean_pass": False}, "clean_pass: got False, want True: chunk 0 is the start frame"),
        ({"init_cache": False}, "init_cache: got False, want True: chunk 0 is the start frame"),
        ({"expected_generator_calls": 5}, "expected_generator_calls: got 5, want 1 = "),
        ({"do_kv_recompute": True}, "expected_generator_calls: got 1, want 2 = "),
        ({"chunk_index": 4}, "num_denoise_steps: got 0, want at least 1; only the start frame"),
    ],
)
def test_a_start_frame_that_is_something_else_too_is_refused(
    make_envelope: MakeEnvelope,
    geometry: ChunkGeometry,
    changes: dict[str, Any],
    message: str,
) -> None:
    envelope = make_envelope("start_frame", **changes)
    with pytest.raises(PreflightError, match=re.escape(message)):
        preflight(envelope, in_hand(envelope), begins_with_a_picture(geometry))


def test_ranks_that_disagree_about_the_start_frame_refuse_each_other_s_chunk_0(
    make_envelope: MakeEnvelope, geometry: ChunkGeometry
) -> None:
    given = make_envelope("start_frame")
    with pytest.raises(PreflightError, match="num_denoise_steps: got 0, want at least 1"):
        preflight(given, in_hand(given), replace(geometry, frames_per_block=1))
    denoised = replace(make_envelope("first"), tensors=given.tensors)
    with pytest.raises(PreflightError, match="num_denoise_steps: got 4, want 0: chunk 0 is the"):
        preflight(denoised, in_hand(denoised), begins_with_a_picture(geometry))


@pytest.mark.parametrize(
    ("chunk", "absent"),
    [
        ("steady", LATENTS_IN),
        ("first", CONDITIONING_EMBEDS),
        ("recompute", CONTEXT_FRAMES_OVERRIDE),
    ],
)
def test_a_missing_tensor_is_refused(
    make_envelope: MakeEnvelope, geometry: ChunkGeometry, chunk: str, absent: str
) -> None:
    whole = make_envelope(chunk)
    envelope = replace(whole, tensors=tuple(s for s in whole.tensors if s.name != absent))
    with pytest.raises(PreflightError, match=f"{absent}: got"):
        preflight(envelope, in_hand(envelope), geometry)


def test_a_new_prompt_without_its_conditioning_is_refused(
    make_envelope: MakeEnvelope, geometry: ChunkGeometry
) -> None:
    envelope = make_envelope("steady", reset_crossattn_cache=True)
    with pytest.raises(PreflightError, match=CONDITIONING_EMBEDS):
        preflight(envelope, in_hand(envelope), geometry)


def test_context_without_recompute_is_refused(
    make_envelope: MakeEnvelope, geometry: ChunkGeometry
) -> None:
    envelope = make_envelope("steady", tensors=make_envelope("recompute").tensors)
    with pytest.raises(PreflightError, match=CONTEXT_FRAMES_OVERRIDE):
        preflight(envelope, in_hand(envelope), geometry)


@pytest.mark.parametrize("chunk", ["first", "recompute"])
def test_text_for_a_recompute_alone_comes_with_both_of_its_bits(
    make_envelope: MakeEnvelope, geometry: ChunkGeometry, chunk: str
) -> None:
    text = TensorSpec(RECOMPUTE_EMBEDS, geometry.dtype, geometry.conditioning_shape)
    whole, rebuilt = make_envelope(chunk), make_envelope("rebuilt")
    envelope = replace(whole, tensors=(*whole.tensors, text))
    with pytest.raises(PreflightError, match=f"{RECOMPUTE_EMBEDS}: got .*, want it only where"):
        preflight(envelope, in_hand(envelope), geometry)
    envelope = replace(rebuilt, tensors=(*rebuilt.tensors, text))
    preflight(envelope, in_hand(envelope), geometry)


@pytest.mark.parametrize(("start_frame", "num_frames"), [(3, 5), (3, 2), (6, 3), (6, 6), (9, 0)])
def test_a_context_of_another_length_than_the_past_allows_is_refused(
    make_envelope: MakeEnvelope, geometry: ChunkGeometry, start_frame: int, num_frames: int
) -> None:
    whole = make_envelope("recompute", current_start_frame=start_frame)
    context = replace(whole.tensors[-1], shape=(1, num_frames, 16, 8, 12))
    envelope = replace(whole, tensors=(*whole.tensors[:-1], context))
    with pytest.raises(PreflightError, match=rf"shape: got .*, want .*{min(5, start_frame)}, 16"):
        preflight(envelope, in_hand(envelope), geometry)


def test_a_model_that_takes_no_context_is_never_asked_to_recompute(
    make_envelope: MakeEnvelope, geometry: ChunkGeometry
) -> None:
    envelope = make_envelope("recompute")
    with pytest.raises(PreflightError, match="do_kv_recompute: got True, want a model whose"):
        preflight(envelope, in_hand(envelope), replace(geometry, context_frames=0))


@pytest.mark.parametrize("name", [LATENTS_IN, CONDITIONING_EMBEDS, CONTEXT_FRAMES_OVERRIDE])
def test_a_tensor_of_another_shape_or_dtype_is_refused(
    make_envelope: MakeEnvelope, geometry: ChunkGeometry, name: str
) -> None:
    whole = make_envelope("recompute")
    for field, change in (("shape", {"shape": (1, 2)}), ("dtype", {"dtype": DType.FLOAT16})):
        specs = tuple(replace(s, **change) if s.name == name else s for s in whole.tensors)
        envelope = replace(whole, tensors=specs)
        with pytest.raises(PreflightError, match=f"{name}.{field}"):
            preflight(envelope, in_hand(envelope), geometry)


def test_the_specs_announced_are_the_tensors_in_hand_in_order(
    make_envelope: MakeEnvelope, geometry: ChunkGeometry
) -> None:
    whole = make_envelope("recompute")
    lies = [
        replace(whole, tensors=whole.tensors[::-1]),
        replace(whole, tensors=whole.tensors[:-1]),
        replace(whole, tensors=(*whole.tensors, whole.tensors[0])),
        replace(whole, tensors=(replace(whole.tensors[0], shape=(1,)), *whole.tensors[1:])),
    ]
    for envelope in lies:
        with pytest.raises(PreflightError, match="tensors: got"):
            preflight(envelope, in_hand(whole), geometry)


def test_an_unknown_or_misnamed_tensor_is_refused(
    make_envelope: MakeEnvelope, geometry: ChunkGeometry
) -> None:
    envelope = make_envelope()
    extra = TensorSpec("noise", DType.FLOAT32, (1,))
    unknown = replace(envelope, tensors=(*envelope.tensors, extra))
    with pytest.raises(PreflightError, match="got 'noise', want only"):
        preflight(unknown, in_hand(unknown), geometry)
    latents, conditioning = envelope.tensors
    swapped = {LATENTS_IN: conditioning, CONDITIONING_EMBEDS: latents}
    with pytest.raises(PreflightError, match=f"want {LATENTS_IN}"):
        preflight(replace(envelope, tensors=(conditioning, latents)), swapped, geometry)


def test_a_shutdown_carries_no_work(geometry: ChunkGeometry) -> None:
    shutdown = shutdown_envelope(plan_id=PlanId.PP0, call_id=9, chunk_index=8, cache_epoch=1)
    preflight(shutdown, {}, geometry)
    with pytest.raises(PreflightError, match="shutdown_envelope"):
        preflight(replace(shutdown, init_cache=True), {}, geometry)


def test_a_chunk_relabelled_as_shutdown_is_refused(
    make_envelope: MakeEnvelope, geometry: ChunkGeometry
) -> None:
    envelope = make_envelope("steady", kind=MessageKind.SHUTDOWN)
    with pytest.raises(PreflightError, match="kind"):
        preflight(envelope, in_hand(envelope), geometry)


def test_a_picture_that_no_receiver_could_hold_is_refused(
    make_envelope: Callable[..., PPEnvelope], geometry: ChunkGeometry
) -> None:
    envelope = make_envelope("steady", height=2**30, width=2**20)
    shape = geometry.latent_shape(envelope.height, envelope.width)
    specs = (replace(envelope.tensors[0], shape=shape), *envelope.tensors[1:])
    envelope = replace(envelope, tensors=specs)
    with pytest.raises(PreflightError, match="latents_in bytes"):
        preflight(envelope, {spec.name: spec for spec in specs}, geometry)
