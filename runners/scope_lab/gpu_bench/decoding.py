"""A chunk's pictures: TAEHV's decoder, and Wan's own where diffusers is installed."""

import time
from collections.abc import Iterator
from importlib.util import find_spec

import torch
from torch import nn

from scope_lab.gpu_bench.ceilings import Line, wait
from scope_lab.gpu_bench.sizes import Sizes
from scope_rt.vae.codec import VideoCodec
from scope_rt.vae.small import (
    MemoryBlock,
    SmallAutoencoder,
    SmallVideoCodec,
    SoftClamp,
    SplitFrames,
)

_WIDTHS = (256, 128, 64, 64)
_BLOCK, _PICTURE_CHANNELS = 3, 3


def decoding(sizes: Sizes, device: torch.device) -> Iterator[Line]:
    """Three chunks each; the last is told, with the copy of its pictures to the host."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    yield _timed("taew2_1", SmallVideoCodec(_small(device, dtype)), sizes, device)
    if sizes.frame_tokens < 100 or find_spec("diffusers") is None:
        yield {"codec": "AutoencoderKLWan", "skipped": "no diffusers, or a tiny run"}
        return
    yield _timed("AutoencoderKLWan", _wan(device, dtype), sizes, device)


def _timed(name: str, codec: VideoCodec, sizes: Sizes, device: torch.device) -> Line:
    decoder = codec.streaming_decoder()
    latents = torch.randn(1, _BLOCK, codec.latent_channels, *sizes.side)
    for _ in range(3):
        wait(device)
        start_s = time.perf_counter()
        frames = decoder.decode(latents)
        took_s = time.perf_counter() - start_s
    line: Line = {"codec": name, "chunk_ms": took_s * 1e3, "frames": frames.shape[1]}
    if device.type == "cuda":
        line["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    return line


def _small(device: torch.device, dtype: torch.dtype) -> SmallAutoencoder:
    """The published decoder's layers, with random weights; nothing is encoded."""
    layers: list[nn.Module] = [SoftClamp(), nn.Conv2d(16, _WIDTHS[0], 3, padding=1), nn.ReLU()]
    for stage, split in enumerate((1, 2, 2)):
        width = _WIDTHS[stage]
        layers += [MemoryBlock(width, width) for _ in range(3)]
        layers += [nn.Upsample(scale_factor=2), SplitFrames(width, split)]
        layers.append(nn.Conv2d(width, _WIDTHS[stage + 1], 3, padding=1, bias=False))
    layers += [nn.ReLU(), nn.Conv2d(_WIDTHS[-1], _PICTURE_CHANNELS, 3, padding=1)]
    model = SmallAutoencoder(nn.Sequential(nn.Identity()), nn.Sequential(*layers))
    return model.to(device, dtype).requires_grad_(False).eval()


def _wan(device: torch.device, dtype: torch.dtype) -> VideoCodec:
    from diffusers import AutoencoderKLWan  # takes seconds, and need not be installed

    from scope_rt.vae.wan import WanVideoCodec
    from scope_rt.vae.wan_config import WanVaeConfig

    vae = AutoencoderKLWan().to(device, dtype).requires_grad_(False).eval()
    config = WanVaeConfig(
        base_dim=vae.config.base_dim,
        z_dim=vae.config.z_dim,
        dim_mult=tuple(vae.config.dim_mult),
        num_res_blocks=vae.config.num_res_blocks,
        temperal_downsample=tuple(vae.config.temperal_downsample),
        latents_mean=tuple(vae.config.latents_mean),
        latents_std=tuple(vae.config.latents_std),
    )
    return WanVideoCodec(vae, config)
