"""The embedded video model makes the same chunks through its cache and without one."""

from dataclasses import dataclass

import torch
from einops import einsum
from torch import Tensor

from scope_contracts.cache_spec import KVCacheSpec
from scope_contracts.call_budget import CallBudget
from scope_contracts.envelope import CONDITIONING_EMBEDS, LATENTS_IN, PlanId
from scope_contracts.tensor_spec import DType
from scope_rt.attention.backend import backend_named
from scope_rt.collectives import SoloCollectives
from scope_rt.control.planner import Planner, StreamSettings
from scope_rt.kv_cache.factory import open_frame_cache
from scope_rt.models.causal_wan import CausalWanModel
from scope_rt.models.generator import ChunkGenerator
from scope_rt.models.loading import EMBEDDED, ModelFolder
from scope_rt.models.noise import SeededNoise
from scope_rt.models.recipe import Recipe
from scope_rt.models.rope import rotations

_PROMPT = "a red circle, fast, on navy"
_SEED, _LATENT_SIDE = 7, 8
_GRID = (_LATENT_SIDE // 2, _LATENT_SIDE // 2)
_FRAME_TOKENS = _GRID[0] * _GRID[1]
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoProof:
    """Largest absolute difference of each chunk's latents."""

    num_chunks: int
    frames_per_chunk: int
    window_frames: int
    differences: tuple[float, ...]

    @property
    def largest(self) -> float:
        return max(self.differences)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stream:
    """A model, its conditioning, and the noise it starts from."""

    model: CausalWanModel
    recipe: Recipe
    window_frames: int
    text: Tensor

    def noise(self, chunk: int, step: int) -> Tensor:
        shape = (1, self.recipe.frames_per_block, self.model.config.in_channels)
        return (
            SeededNoise()
            .draw(
                base_seed=_SEED,
                cache_epoch=0,
                chunk_index=chunk,
                step=step,
                shape=(*shape, _LATENT_SIDE, _LATENT_SIDE),
            )
            .double()
        )


@torch.inference_mode()
def prove_on_video(*, num_chunks: int = 4, window_frames: int = 6) -> VideoProof:
    """Make the first chunks of a stream both ways; the window is short, so frames are evicted."""
    folder = ModelFolder.open(EMBEDDED)
    stream = _Stream(
        model=folder.transformer(SoloCollectives(), dtype=torch.float64, device=_CPU),
        recipe=folder.recipe,
        window_frames=window_frames,
        text=folder.text_encoder()([_PROMPT]).double(),
    )
    cached, full = _through_the_cache(stream, num_chunks), _without_a_cache(stream, num_chunks)
    pairs = zip(cached, full, strict=True)
    return VideoProof(
        num_chunks=num_chunks,
        frames_per_chunk=folder.recipe.frames_per_block,
        window_frames=window_frames,
        differences=tuple(float((mine - whole).abs().max()) for mine, whole in pairs),
    )


def _through_the_cache(stream: _Stream, num_chunks: int) -> list[Tensor]:
    """As a stream runs: each chunk's queries meet the ring."""
    config, recipe = stream.model.config, stream.recipe
    spec = KVCacheSpec(
        num_layers=config.num_layers,
        num_heads=config.num_attention_heads,
        head_dim=config.attention_head_dim,
        frame_tokens=_FRAME_TOKENS,
        sink_frames=0,
        window_frames=stream.window_frames,
        batch=1,
        dtype=DType.FLOAT64,
        block_frames=recipe.frames_per_block,
    )
    generator = ChunkGenerator(
        model=stream.model,
        cache=open_frame_cache(spec, device=_CPU),
        schedule=recipe.schedule,
        backend=backend_named("sdpa"),
        noise=SeededNoise(),
    )
    settings = StreamSettings(
        plan_id=PlanId.SINGLE,
        recipe=recipe,
        height=_LATENT_SIDE * 8,
        width=_LATENT_SIDE * 8,
        base_seed=_SEED,
    )
    chunks, planner = list[Tensor](), Planner(settings=settings)
    for chunk in range(num_chunks):
        plan, planner = planner.next(hard_cut=False, new_text=False)
        tensors = {LATENTS_IN: stream.noise(chunk, 0)}
        if plan.reset_crossattn_cache:
            tensors[CONDITIONING_EMBEDS] = stream.text
        budget = CallBudget(chunk, plan.expected_generator_calls)
        chunks.append(generator.generate(plan, tensors, budget.enter))
    return chunks


def _without_a_cache(stream: _Stream, num_chunks: int) -> list[Tensor]:
    """Every step runs the whole sequence: finished chunks clean at t=0, the open one at t."""
    model, recipe, block = stream.model, stream.recipe, stream.recipe.frames_per_block
    text, sigma = model.text_kv(stream.text[:, None]), recipe.schedule.sigma
    steps = recipe.timesteps
    done: list[Tensor] = []
    for chunk in range(num_chunks):
        frames, x = (chunk + 1) * block, stream.noise(chunk, 0)
        head_dim = model.config.attention_head_dim
        rope = rotations(range(frames), grid=_GRID, head_dim=head_dim, dtype=torch.complex128)
        attend = _DenseMask(_visible(frames, block=block, window=stream.window_frames))
        for index, t in enumerate(steps):
            times = torch.tensor([[0.0] * (frames - block) + [t] * block], dtype=torch.float64)
            flow = model(
                torch.cat([*done, x], 1),
                modulation=model.modulation(times),
                rope=rope,
                text=text,
                attend=attend,
            )[:, -block:]
            x0 = x - sigma(t) * flow
            if index + 1 < len(steps):
                noise = sigma(steps[index + 1])
                x = (1 - noise) * x0 + noise * stream.noise(chunk, index + 1)
        done.append(x0)
    return done


def _visible(num_frames: int, *, block: int, window: int) -> Tensor:
    """Which token sees which: its chunk, and the window that ends with it; bool `[T, T]`."""
    frame = torch.arange(num_frames).repeat_interleave(_FRAME_TOKENS)
    end = (frame // block + 1) * block
    return (frame < end[:, None]) & (frame >= end[:, None] - window)


@dataclass(frozen=True, slots=True)
class _DenseMask:
    """Attention written out, one mask over all tokens."""

    visible_TT: Tensor

    def __call__(self, layer: int, q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor) -> Tensor:
        scores = einsum(q_BTHD, k_BTHD, "b t h d, b s h d -> b h t s") / q_BTHD.shape[-1] ** 0.5
        weights = scores.masked_fill(~self.visible_TT, -torch.inf).softmax(-1)
        out: Tensor = einsum(weights, v_BTHD, "b h t s, b s h d -> b t h d")
        return out
