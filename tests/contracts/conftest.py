"""One legal chunk of every kind; a test changes the one thing that it is about."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings

from scope_contracts import (
    CONDITIONING_EMBEDS,
    CONTEXT_FRAMES_OVERRIDE,
    LATENTS_IN,
    ChunkGeometry,
    DType,
    PPEnvelope,
    TensorSpec,
)
from scope_lab.fuzz import seeds

settings.register_profile("contracts", derandomize=True, deadline=None, max_examples=150)
settings.load_profile("contracts")

LATENTS = TensorSpec(LATENTS_IN, DType.FLOAT32, (1, 3, 16, 8, 12))
CONDITIONING = TensorSpec(CONDITIONING_EMBEDS, DType.FLOAT32, (1, 6, 64))
CONTEXT = TensorSpec(CONTEXT_FRAMES_OVERRIDE, DType.FLOAT32, (1, 3, 16, 8, 12))

FIRST = replace(seeds.FIRST, height=64, width=96, tensors=(LATENTS, CONDITIONING))
STEADY = replace(seeds.STEADY, kv_cache_attention_bias=1.0, height=64, width=96, tensors=(LATENTS,))
RECOMPUTE = replace(
    STEADY,
    clean_pass=False,
    do_kv_recompute=True,
    kv_cache_attention_bias=0.3,
    tensors=(LATENTS, CONDITIONING, CONTEXT),
)
REBUILT = replace(
    STEADY,
    do_kv_recompute=True,
    reset_crossattn_cache=True,
    expected_generator_calls=6,
    tensors=(LATENTS, CONDITIONING, CONTEXT),
)
"""A clean-pass model goes on after its ranks were started again."""
START_FRAME = replace(
    FIRST,
    num_denoise_steps=0,
    denoising_step_list=(),
    expected_generator_calls=1,
    tensors=(replace(LATENTS, shape=(1, 1, 16, 8, 12)), CONDITIONING),
)
"""Chunk 0 of a model of one latent frame a chunk is a picture."""
CHUNKS = {
    "first": FIRST,
    "steady": STEADY,
    "recompute": RECOMPUTE,
    "rebuilt": REBUILT,
    "start_frame": START_FRAME,
}

MakeEnvelope = Callable[..., PPEnvelope]


@pytest.fixture(scope="session")
def make_envelope() -> MakeEnvelope:
    """`make_envelope("steady", height=32)`: a legal chunk of that kind, with fields replaced."""

    def make(chunk: str = "first", **changes: Any) -> PPEnvelope:
        return replace(CHUNKS[chunk], **changes)

    return make


@pytest.fixture(scope="session")
def geometry() -> ChunkGeometry:
    """The geometry that the legal chunks were made for, at 64x96 pixels."""
    return ChunkGeometry(
        latent_channels=16,
        frames_per_block=3,
        text_len=6,
        text_dim=64,
        dtype=DType.FLOAT32,
        context_frames=5,
    )
