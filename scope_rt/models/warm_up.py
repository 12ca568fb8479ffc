"""A chunk that nobody sees is generated before the stream: first calls load kernels and plan sums.

It is as large as the stream's chunks, goes through the stream's own model, cache and group, and
leaves nothing of it in the cache.
"""

import torch

from scope_contracts.envelope import CONDITIONING_EMBEDS, CONTEXT_FRAMES_OVERRIDE, LATENTS_IN
from scope_contracts.geometry import ChunkGeometry
from scope_rt.models.generator import ChunkGenerator
from scope_rt.models.lone_chunk import lone_envelope
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
        positions=generator.positions,
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
    for chunk in range(1 if recipe.clean_pass else 2):
        envelope = lone_envelope(
            chunk,
            recipe.timesteps[:1],
            frames_per_block=recipe.frames_per_block,
            height=height,
            width=width,
            clean_pass=recipe.clean_pass,
            recomputes=chunk > 0,
        )
        fresh.generate(envelope, tensors, lambda: None).cpu()
    generator.cache.reset()
