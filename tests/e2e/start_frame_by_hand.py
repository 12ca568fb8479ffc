"""A rollout that begins with a picture, of diffusers' own pieces and no cache; not a test itself.

As `initial_latent` in the projects' code: the picture's latents are a block of their own at t=0,
and generation goes on with the next block. Each step runs all frames so far through diffusers'
transformer, the past at t=0, by a mask that is causal from block to block.
"""

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

SHIFT = 5.0


def sigma_of(nominal: int) -> float:
    """Of a nominal step of 1000, shifted (Esser et al. 2024, eq. 23)."""
    share = nominal / 1000
    return SHIFT * share / (1 + (SHIFT - 1) * share)


def noise_of(seed: int, chunk: int, step: int, shape: Sequence[int]) -> Tensor:
    """What the stream draws: of seed, epoch 0, chunk and step."""
    digest = hashlib.blake2b(struct.pack("<4q", seed, 0, chunk, step), digest_size=8).digest()
    drawn = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.randn(*shape, generator=drawn)


def _loaded(kind: Any, folder: Path) -> Any:
    """Without diffusers' own loader, which wants another package."""
    config = json.loads((folder / "config.json").read_text())
    sizes = {name: value for name, value in config.items() if not name.startswith("_")}
    model = kind(**sizes)
    state = {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}
    model.load_state_dict(state)
    return model.float().eval()


@torch.no_grad()
def latents_of_picture(vae_folder: Path, picture_HWC: Tensor) -> Tensor:
    """Normalised, `[1, 1, C, H/8, W/8]`, by diffusers' whole encode."""
    from diffusers import AutoencoderKLWan

    vae = _loaded(AutoencoderKLWan, vae_folder)
    video = picture_HWC.permute(2, 0, 1)[None, :, None] / 127.5 - 1
    raw = vae.encode(video).latent_dist.mode()
    mean, std = (
        torch.tensor(each)[:, None, None, None]
        for each in (vae.config.latents_mean, vae.config.latents_std)
    )
    latents: Tensor = ((raw - mean) / std).transpose(1, 2)
    return latents


class _BlockCausal:
    """Diffusers' processor, with a mask over whatever attends to itself."""

    def __init__(self, mask: Tensor) -> None:
        from diffusers.models.transformers.transformer_wan import WanAttnProcessor

        self._processor: Any = WanAttnProcessor()
        self._mask = mask

    def __call__(
        self, attn: Any, hidden: Tensor, encoded: Tensor | None = None, *args: Any, **named: Any
    ) -> Any:
        if encoded is not None:
            return self._processor(attn, hidden, encoded, *args, **named)
        _, *rest = args or (None,)
        return self._processor(attn, hidden, None, self._mask, *rest, **named)


@torch.no_grad()
def rollout(
    transformer_folder: Path,
    first_BFCHW: Tensor,
    text: Tensor,
    steps_of: Sequence[Sequence[int]],
    *,
    seed: int,
) -> Tensor:
    """Latents of the picture and of one chunk of a frame for each of `steps_of`, its nominal
    steps; all frames are in the window."""
    from diffusers import WanTransformer3DModel

    model = _loaded(WanTransformer3DModel, transformer_folder)
    done = first_BFCHW
    tokens = first_BFCHW.shape[-2] * first_BFCHW.shape[-1] // 4
    for chunk, steps in enumerate(steps_of, start=1):
        frame = torch.arange(chunk + 1).repeat_interleave(tokens)
        model.set_attn_processor(_BlockCausal(frame[:, None] >= frame[None]))
        x = noise_of(seed, chunk, 0, first_BFCHW.shape)
        for number, nominal in enumerate(steps):
            sigma = sigma_of(nominal)
            times = torch.where(frame == chunk, 1000 * sigma, 0.0)[None]
            inputs = torch.cat([done, x], 1).transpose(1, 2)
            flow = model(inputs, times, text, return_dict=False)[0].transpose(1, 2)[:, -1:]
            x0 = x - sigma * flow
            if number + 1 < len(steps):
                following = sigma_of(steps[number + 1])
                noise = noise_of(seed, chunk, number + 1, x.shape)
                x = (1 - following) * x0 + following * noise
        done = torch.cat([done, x0], 1)
    return done
