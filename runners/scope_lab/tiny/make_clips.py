"""Turn the world into training data: what is on disk is whole shards, each a function of the seed.

A shard holds `latents [512, 12, 16, 8, 8]` of clips of four chunks and `text [512, 4, 6, 64]` of
each chunk's scene, in fp16. It also keeps the state of the random generator behind it, so that an
interrupted run resumes with the clips it would have made.
"""

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from scope_lab.tiny.world import sample_clips
from scope_rt.text.words import WordTextEncoder
from scope_rt.vae.tiny import TinyVideoCodec

CLIP_FRAMES = 48
CHANGE_PROBABILITY = 0.12
CLIPS_PER_SHARD = 512
_BATCH = 32


def make_clips(
    folder: Path,
    *,
    codec: TinyVideoCodec,
    text_encoder: WordTextEncoder,
    num_shards: int,
    seed: int,
    clips_per_shard: int = CLIPS_PER_SHARD,
) -> None:
    """Write the shards that `folder` still lacks, each at once."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    for index in range(num_shards):
        path = folder / f"{seed:02d}_{index:03d}.safetensors"
        if path.exists():
            with safe_open(path, "pt") as shard:
                generator.set_state(shard.get_tensor("generator"))
            continue
        tensors = _draw(codec, text_encoder, clips_per_shard, generator)
        partial = path.with_suffix(".partial")
        save_file(tensors | {"generator": generator.get_state()}, partial)
        partial.replace(path)
        print(f"clips: shard {index + 1} of {num_shards}", flush=True)


@torch.inference_mode()
def _draw(
    codec: TinyVideoCodec, text_encoder: WordTextEncoder, count: int, generator: torch.Generator
) -> dict[str, Tensor]:
    latents, text = [], []
    for _ in range(count // _BATCH):
        clips = sample_clips(_BATCH, CLIP_FRAMES, generator, CHANGE_PROBABILITY)
        latents.append(codec.encode(clips.video_BTCHW).half())
        text.append(torch.stack([text_encoder.encode(scenes) for scenes in clips.scenes]).half())
    return {"latents": torch.cat(latents), "text": torch.cat(text)}
