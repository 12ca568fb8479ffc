"""TAEHV, a small autoencoder for the latents of a large one: faster pictures of less detail.

(Boer Bohan 2025, "Tiny AutoEncoder for Hunyuan Video"; for Wan 2.1 the file `taew2_1`.) Its layers
work on frames one by one, but for blocks that see the frame before, and two that merge or split
frames. A stream runs one latent frame at a time and carries each block's last frame. It takes and
gives latents as the transformer has them, without mean and std.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from scope_rt.vae.codec import CodecSizes
from scope_rt.vae.group_encoder import GroupEncoder
from scope_rt.vae.pictures import to_bytes

FRAMES, STRIDE, LATENT_CHANNELS = 4, 8, 16
CONTEXT_FRAMES = 8
"""Three blocks see the latent frame before, then three again, and three more at twice the rate."""


class MemoryBlock(nn.Module):
    """Three convolutions over a frame and the one before it, beside a skip."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        convolutions = [
            nn.Conv2d(width, channels, 3, padding=1)
            for width in (2 * channels_in, channels, channels)
        ]
        first, second, third = convolutions
        self.conv = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third)
        is_plain = channels_in == channels
        self.skip = nn.Identity() if is_plain else nn.Conv2d(channels_in, channels, 1, bias=False)

    def forward(self, x_BTCHW: Tensor, before_BCHW: Tensor | None) -> Tensor:
        if before_BCHW is None:
            before_BCHW = torch.zeros_like(x_BTCHW[:, 0])
        earlier_BTCHW = torch.cat([before_BCHW[:, None], x_BTCHW[:, :-1]], 1)
        num = x_BTCHW.shape[1]
        x = x_BTCHW.flatten(0, 1)
        mixed: Tensor = self.conv(torch.cat([x, earlier_BTCHW.flatten(0, 1)], 1))
        return rearrange(F.relu(mixed + self.skip(x)), "(b t) c h w -> b t c h w", t=num)


class MergeFrames(nn.Module):
    """Every `num` frames become one."""

    def __init__(self, channels: int, num: int) -> None:
        super().__init__()
        self.num = num
        self.conv = nn.Conv2d(channels * num, channels, 1, bias=False)

    def forward(self, x_BTCHW: Tensor) -> Tensor:
        packed = rearrange(x_BTCHW, "b (t n) c h w -> (b t) (n c) h w", n=self.num)
        merged: Tensor = self.conv(packed)
        return rearrange(merged, "(b t) c h w -> b t c h w", b=len(x_BTCHW))


class SplitFrames(nn.Module):
    """Every frame becomes `num`."""

    def __init__(self, channels: int, num: int) -> None:
        super().__init__()
        self.num = num
        self.conv = nn.Conv2d(channels, channels * num, 1, bias=False)

    def forward(self, x_BTCHW: Tensor) -> Tensor:
        packed: Tensor = self.conv(x_BTCHW.flatten(0, 1))
        return rearrange(packed, "(b t) (n c) h w -> b (t n) c h w", n=self.num, b=len(x_BTCHW))


class SoftClamp(nn.Module):
    """Latents within (-3, 3)."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x / 3) * 3


class SmallAutoencoder(nn.Module):
    """Encoder and decoder, with the names of the published files."""

    def __init__(self, encoder: nn.Sequential, decoder: nn.Sequential) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder


def run(layers: nn.Sequential, x_BTCHW: Tensor, carried: list[Tensor | None]) -> Tensor:
    """The next frames through all layers; changes `carried`, which has a place for each layer."""
    for place, layer in enumerate(layers):
        if isinstance(layer, MemoryBlock):
            before_BCHW, carried[place] = carried[place], x_BTCHW[:, -1].clone()
            x_BTCHW = layer(x_BTCHW, before_BCHW)
        elif isinstance(layer, MergeFrames | SplitFrames):
            x_BTCHW = layer(x_BTCHW)
        else:
            x_BTCHW = layer(x_BTCHW.flatten(0, 1)).unflatten(0, (len(x_BTCHW), -1))
    return x_BTCHW


class SmallVideoCodec:
    """Loaded by `scope_rt.vae.loading`; on a device and in a dtype of its own.

    What goes in and comes out lies on the CPU, latents in float32.
    """

    sizes: ClassVar[CodecSizes] = CodecSizes(
        latent_channels=LATENT_CHANNELS,
        spatial_stride=STRIDE,
        temporal_stride=FRAMES,
        first_latent_frames=1,
        decoder_context_frames=CONTEXT_FRAMES,
    )
    latent_channels = sizes.latent_channels
    spatial_stride = sizes.spatial_stride
    temporal_stride = sizes.temporal_stride
    first_latent_frames = sizes.first_latent_frames
    decoder_context_frames = sizes.decoder_context_frames

    def __init__(self, model: SmallAutoencoder) -> None:
        self.model = model
        weight = next(model.parameters())
        self.device, self.dtype = weight.device, weight.dtype

    def streaming_decoder(self) -> "SmallStreamingDecoder":
        return SmallStreamingDecoder(self)

    def streaming_encoder(self) -> GroupEncoder:
        return GroupEncoder(self, self._encode, lambda: [None] * len(self.model.encoder))

    def _encode(self, group_BTHWC: Tensor, carried: list[Tensor | None]) -> Tensor:
        """The first picture as if it had stood still before."""
        whole_BTHWC = group_BTHWC.expand(-1, FRAMES, -1, -1, -1)
        video_BTCHW = rearrange(whole_BTHWC, "b t h w c -> b t c h w")
        video_BTCHW = video_BTCHW.to(self.device, self.dtype) / 255
        return run(self.model.encoder, video_BTCHW, carried).float().cpu()


class SmallStreamingDecoder:
    """Latents to pictures; an epoch's first latent frame gives its last picture only."""

    _carried: list[Tensor | None]
    _starts_epoch: bool

    def __init__(self, codec: SmallVideoCodec) -> None:
        self._codec = codec
        self.reset()

    def decode(self, latents_BFCHW: Tensor) -> Tensor:
        """The next pictures, uint8 `[B, T, 8 H, 8 W, 3]`; blocks until they are on the CPU."""
        pictures = to_bytes(self.decode_video(latents_BFCHW))
        return rearrange(pictures, "b t c h w -> b t h w c").contiguous()

    @torch.inference_mode()
    def decode_video(self, latents_BFCHW: Tensor) -> Tensor:
        """The next frames as float32 video `[B, T, 3, 8 H, 8 W]` in [-1, 1]."""
        pieces = []
        for latent_BFCHW in latents_BFCHW.to(self._codec.device, self._codec.dtype).split(1, 1):
            raw = run(self._codec.model.decoder, latent_BFCHW.contiguous(), self._carried)
            shown = raw[:, -1:] if self._starts_epoch else raw
            self._starts_epoch = False
            pieces.append(shown.float().clamp(0, 1).cpu() * 2 - 1)
        return torch.cat(pieces, 1)

    def reset(self) -> None:
        """Forget the past: the next latent frame is the first of an epoch."""
        self._carried = [None] * len(self._codec.model.decoder)
        self._starts_epoch = True
