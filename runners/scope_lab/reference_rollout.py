"""A recorded rollout as this runtime sees it: a recipe, a geometry, noise, and what came out.

`NAME.safetensors` holds weights in the original Wan naming, noise, text and the result,
`NAME.json` the sizes and the cache indices after every generator call; tests/parity/README.md
describes both.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from scope_contracts.cache_spec import KVCacheSpec
from scope_contracts.errors import UserInputError
from scope_contracts.geometry import ChunkGeometry
from scope_contracts.tensor_spec import DType
from scope_lab.recorded_noise import RecordedNoise
from scope_rt.models.config import CausalWanConfig
from scope_rt.models.recipe import Recipe
from scope_rt.models.recipe_choices import CacheUpkeep


class RecordedAnchors:
    """Anchors in place of an autoencoder's, in turn: the epoch's first recompute needs none."""

    def __init__(self, anchors: Sequence[Tensor]) -> None:
        self._anchors = iter(anchors)

    def __call__(self, frames_BTHWC: Tensor) -> Tensor:
        return next(self._anchors)


class BlankDecoder:
    """Frames of nothing: a recording ends at its latents."""

    def __init__(self, frames_per_latent: int) -> None:
        self._frames_per_latent = frames_per_latent

    def decode(self, latents_BFCHW: Tensor) -> Tensor:
        batch, num_frames = latents_BFCHW.shape[:2]
        shape = (batch, num_frames * self._frames_per_latent, 1, 1, 3)
        return torch.zeros(shape, dtype=torch.uint8)

    def reset(self) -> None: ...


class Recording:
    """The files of one recording, read and checked."""

    def __init__(self, path: Path) -> None:
        try:
            self.tensors = load_file(path)
            raw = json.loads(path.with_suffix(".json").read_text())
            self.sizes: dict[str, Any] = raw["config"]
            self.calls: list[dict[str, Any]] = raw["calls"]
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise UserInputError(
                f"cannot read the recording {path}: {error!r}; give NAME.safetensors with "
                f"NAME.json beside it"
            ) from error
        needed = ("noise", "renoise", "text_embeds", "denoising_step_list", "latents")
        missing = [name for name in needed if name not in self.tensors]
        if missing:
            raise UserInputError(f"{path} lacks {', '.join(missing)}; is it a rollout recording?")

    @property
    def timesteps(self) -> tuple[float, ...]:
        return tuple(self.tensors["denoising_step_list"].tolist())

    def config(self) -> CausalWanConfig:
        sizes = self.sizes
        return CausalWanConfig(
            num_attention_heads=sizes["heads"],
            attention_head_dim=sizes["dim"] // sizes["heads"],
            in_channels=sizes["in_dim"],
            out_channels=sizes["in_dim"],
            text_dim=sizes["text_dim"],
            freq_dim=sizes["freq_dim"],
            ffn_dim=sizes["ffn_dim"],
            num_layers=sizes["layers"],
        )

    def recipe(self) -> Recipe:
        """How the reference sampled and kept its cache: its window counts the sinks in."""
        sizes, sink = self.sizes, self.sizes.get("sink", 0)
        num_frames = self.tensors["noise"].shape[1]
        attended = num_frames if sizes["local_attn"] == -1 else sizes["local_attn"]
        recomputes = "kv_cache_num_frames" in sizes
        return Recipe(
            denoising_steps=self.timesteps,
            warp_steps=False,
            shift=sizes["shift"],
            frames_per_block=sizes["frames_per_block"],
            window_frames=attended - sink,
            sink_frames=sink,
            fps=16,
            default_height=self.tensors["noise"].shape[3] * 8,
            default_width=self.tensors["noise"].shape[4] * 8,
            cache_upkeep=CacheUpkeep.RECOMPUTE if recomputes else CacheUpkeep.CLEAN_PASS,
            kv_cache_num_frames=sizes.get("kv_cache_num_frames", 0),
        )

    def geometry(self) -> ChunkGeometry:
        batch, _, channels, _, _ = self.tensors["noise"].shape
        _, text_len, text_dim = self.tensors["text_embeds"].shape
        recipe = self.recipe()
        return ChunkGeometry(
            batch=batch,
            latent_channels=channels,
            frames_per_block=recipe.frames_per_block,
            text_len=text_len,
            text_dim=text_dim,
            dtype=DType.FLOAT32,
            context_frames=recipe.context_frames,
        )

    def cache_spec(self) -> KVCacheSpec:
        batch, _, _, height, width = self.tensors["noise"].shape
        config, recipe = self.config(), self.recipe()
        return KVCacheSpec(
            num_layers=config.num_layers,
            num_heads=config.num_attention_heads,
            head_dim=config.attention_head_dim,
            frame_tokens=height * width // 4,
            sink_frames=recipe.sink_frames,
            window_frames=recipe.window_frames,
            batch=batch,
            dtype=DType.FLOAT32,
        )

    def noise(self) -> RecordedNoise:
        chunks = self.tensors["noise"].split(self.sizes["frames_per_block"], dim=1)
        return RecordedNoise(chunks, self.tensors["renoise"].split(len(self.timesteps) - 1))
