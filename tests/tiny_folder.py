"""A model folder with small random weights, for tests that stream; not a test itself."""

import atexit
import shutil
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from scope_rt.models.causal_wan import CausalWanModel
from scope_rt.models.config import CausalWanConfig
from scope_rt.models.loading import save_transformer
from scope_rt.models.recipe import Recipe
from scope_rt.models.recipe_choices import CacheUpkeep
from scope_rt.text.words import WordTextEncoder
from scope_rt.vae.tiny import TinyCodecConfig, TinyVideoCodec

CONFIG = CausalWanConfig(
    num_attention_heads=4,
    attention_head_dim=12,
    in_channels=16,
    out_channels=16,
    text_dim=64,
    freq_dim=32,
    ffn_dim=64,
    num_layers=2,
)
RECIPE = Recipe(
    denoising_steps=(1000.0, 500.0),
    shift=5.0,
    frames_per_block=3,
    window_frames=6,
    sink_frames=1,
    fps=16,
    default_height=16,
    default_width=32,
)


KREA_RECIPE = replace(
    RECIPE,
    cache_upkeep=CacheUpkeep.RECOMPUTE,
    kv_cache_num_frames=4,
    window_frames=7,
    sink_frames=0,
    warp_steps=False,
)
"""The same weights as a model that keeps its cache by recompute, as Krea's do."""


FRAMEWISE_RECIPE = replace(
    RECIPE,
    frames_per_block=1,
    start_frame=True,
    first_chunk_steps=(1000.0, 750.0, 500.0),
)
"""The same weights as a model of one latent frame a chunk, which may begin with a picture."""


@cache
def tiny_folder() -> Path:
    """One for all tests of this process, which change nothing in it. A chunk of it takes an eighth
    of what one of the embedded model takes."""
    folder = Path(tempfile.mkdtemp(prefix="tiny-model"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return write_tiny_folder(folder)


def write_tiny_folder(folder: Path, recipe: Recipe = RECIPE) -> Path:
    """Write all parts of a model to `folder`; equal every time."""
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    recipe.save(folder)
    weights = {
        name: torch.randn(p.shape) * (0.5 if p.ndim == 1 else 0.1)
        for name, p in CausalWanModel(CONFIG).named_parameters()
    }
    save_transformer(CONFIG, weights, folder / "transformer")
    codec = TinyVideoCodec(TinyCodecConfig(wide_channels=16, narrow_channels=4, num_blocks=1))
    codec.save_pretrained(folder / "vae")
    WordTextEncoder.from_seed(0).save_pretrained(folder / "text_encoder")
    return folder
