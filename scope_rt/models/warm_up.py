"""A chunk that nobody sees is generated before the stream: first calls load kernels and plan sums.

It is as large as the stream's chunks, goes through the stream's own model, cache and group, and
leaves nothing of it in the cache.
"""

from collections.abc import Iterator

import torch

from scope_contracts.envelope import (
    CONDITIONING_EMBEDS,
    CONTEXT_FRAMES_OVERRIDE,
    LATENTS_IN,
    MessageKind,
    PlanId,
    PPEnvelope,
)
from scope_contracts.geometry import ChunkGeometry
from scope_rt.models.generator import ChunkGenerator
from scope_rt.models.recipe import Recipe
from scope_rt.tensor_digests import NoDigests
from scope_rt.tensors import TORCH_DTYPES


def warm_up(
    generator: ChunkGenerator,
    recipe: Recipe,
    geometry: ChunkGeometry,
    *,
    height: int,
    width: int,
) -> None:
    """Generate a chunk of one step, and one that rebuilds the cache where the recipe does that.

    All ranks of a group call it; blocks until the device has finished. Sizes in pixels.
    """
    fresh = ChunkGenerator(
        model=generator.model,
        cache=generator.cache,
        schedule=generator.schedule,
        backend=generator.backend,
        noise=generator.noise,
        derived=NoDigests(),
    )
    dtype = TORCH_DTYPES[geometry.dtype]
    latents = torch.zeros(geometry.latent_shape(height, width), dtype=dtype)
    text = torch.zeros(geometry.batch, geometry.text_len, geometry.text_dim, dtype=dtype)
    tensors = {
        LATENTS_IN: latents,
        CONDITIONING_EMBEDS: text,
        CONTEXT_FRAMES_OVERRIDE: latents[:, :1].expand(-1, recipe.context_frames, -1, -1, -1),
    }
    for envelope in _envelopes(recipe, height=height, width=width):
        fresh.generate(envelope, tensors, lambda: None).cpu()
    generator.cache.reset()


def _envelopes(recipe: Recipe, *, height: int, width: int) -> Iterator[PPEnvelope]:
    for chunk in range(1 if recipe.clean_pass else 2):
        is_first = chunk == 0
        yield PPEnvelope(
            plan_id=PlanId.SINGLE,
            call_id=chunk,
            chunk_index=chunk,
            cache_epoch=0,
            kind=MessageKind.INFER,
            init_cache=is_first,
            reset_kv_cache=is_first,
            reset_crossattn_cache=is_first,
            current_start_frame=chunk * recipe.frames_per_block,
            do_kv_recompute=not is_first,
            clean_pass=recipe.clean_pass,
            num_denoise_steps=1,
            expected_generator_calls=2,
            kv_cache_attention_bias=1.0,
            denoising_step_list=recipe.timesteps[:1],
            height=height,
            width=width,
            base_seed=0,
        )
