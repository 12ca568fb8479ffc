"""Small random models for tests; not a test itself."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor

from scope_contracts.cache_spec import CacheChoice, KVCacheSpec
from scope_contracts.call_budget import CallBudget
from scope_contracts.envelope import (
    CONDITIONING_EMBEDS,
    LATENTS_IN,
    PPEnvelope,
)
from scope_contracts.tensor_spec import DType
from scope_rt.attention.backend import backend_named
from scope_rt.kv_cache.factory import open_frame_cache
from scope_rt.models.causal_wan import CausalWanModel
from scope_rt.models.config import CausalWanConfig
from scope_rt.models.generator import ChunkGenerator
from scope_rt.models.lone_chunk import lone_envelope
from scope_rt.models.noise import SeededNoise
from scope_rt.models.schedule import FlowSchedule
from scope_rt.tensors import NAMES

CONFIG = CausalWanConfig(
    num_attention_heads=4,
    attention_head_dim=16,
    in_channels=4,
    out_channels=4,
    text_dim=16,
    freq_dim=32,
    ffn_dim=96,
    num_layers=3,
)
STEPS = (1000.0, 937.5, 625.0)
BLOCK, SIDE = 3, 4
"""Latent frames of a chunk, and latent cells along a picture's side."""
CPU = torch.device("cpu")
GRID = (SIDE // 2, SIDE // 2)


def random_model(dtype: torch.dtype = torch.float64, seed: int = 0) -> CausalWanModel:
    """A model whose every parameter is random, norms and tables included; `seed` is set."""
    model = deepcopy(_drawn_model(dtype, seed))
    torch.manual_seed(seed)
    return model


@cache
def _drawn_model(dtype: torch.dtype, seed: int) -> CausalWanModel:
    torch.manual_seed(seed)
    model = CausalWanModel(CONFIG).to(dtype).requires_grad_(False)
    for p in model.parameters():
        p.copy_(torch.randn(p.shape, dtype=torch.float64) * (0.5 if p.ndim == 1 else 0.1))
    return model.eval()


def cache_spec(*, sink: int, window: int, dtype: DType = DType.FLOAT64) -> KVCacheSpec:
    return KVCacheSpec(
        num_layers=CONFIG.num_layers,
        num_heads=CONFIG.num_attention_heads,
        head_dim=CONFIG.attention_head_dim,
        frame_tokens=GRID[0] * GRID[1],
        sink_frames=sink,
        window_frames=window,
        batch=1,
        dtype=dtype,
        block_frames=BLOCK,
    )


def envelope(chunk: int, *, bias: float = 1.0, calls: int | None = None) -> PPEnvelope:
    """The plan of chunk `chunk` of the first epoch."""
    side = SIDE * 8
    lone = lone_envelope(
        chunk, STEPS, frames_per_block=BLOCK, height=side, width=side, bias=bias, seed=3
    )
    return lone if calls is None else replace(lone, expected_generator_calls=calls)


@dataclass
class Rollout:
    """A generator over a random model, and the inputs of its chunks."""

    sink: int
    window: int
    backend: str = "sdpa"
    dtype: torch.dtype = torch.float64
    cache: CacheChoice = field(default_factory=CacheChoice)
    model: CausalWanModel = field(init=False)
    generator: ChunkGenerator = field(init=False)
    text: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.model = random_model(self.dtype)
        spec = cache_spec(sink=self.sink, window=self.window, dtype=NAMES[self.dtype])
        spec = replace(spec, kind=self.cache.kind, codec=self.cache.codec)
        self.text = torch.randn(
            1, 5, CONFIG.text_dim, generator=torch.Generator().manual_seed(1), dtype=self.dtype
        )
        self.generator = ChunkGenerator(
            model=self.model,
            cache=open_frame_cache(spec, device=CPU),
            schedule=FlowSchedule(),
            backend=backend_named(self.backend),
            noise=SeededNoise(),
        )

    def noise(self, chunk: int) -> Tensor:
        """The starting noise of a chunk."""
        return (
            SeededNoise()
            .draw(
                base_seed=3,
                cache_epoch=0,
                chunk_index=chunk,
                step=0,
                shape=(1, BLOCK, CONFIG.in_channels, SIDE, SIDE),
            )
            .to(self.dtype)
        )

    def run(self, chunks: Sequence[int], *, bias: float = 1.0) -> list[Tensor]:
        """Latents of `chunks`, cached."""
        return [self.chunk(chunk, bias=bias) for chunk in chunks]

    def chunk(self, chunk: int, *, bias: float = 1.0) -> Tensor:
        plan = envelope(chunk, bias=bias)
        tensors = {LATENTS_IN: self.noise(chunk)}
        if plan.reset_crossattn_cache:
            tensors[CONDITIONING_EMBEDS] = self.text
        return self.generator.generate(plan, tensors, CallBudget(chunk, len(STEPS) + 1).enter)
