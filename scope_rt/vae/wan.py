"""Wan's video autoencoder as a stream: the pictures are those of the whole, at any split.

Diffusers' `AutoencoderKLWan` decodes one latent frame at a time, and encodes one group of pictures
at a time, with inputs of its causal convolutions carried from call to call; here the stream carries
them. The same kernels run on the same shapes as in its `decode` and `encode`: the bits are equal.
Latents outside of it are normalised by the mean and std of each channel; that is done here alone.
"""

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from scope_rt.vae.group_encoder import GroupEncoder
from scope_rt.vae.pictures import to_bytes, to_video
from scope_rt.vae.wan_config import WanVaeConfig


class WanVideoCodec:
    """Loaded by `scope_rt.vae.loading`; on a device and in a dtype of its own.

    What goes in and comes out lies on the CPU, latents in float32.
    """

    def __init__(self, vae: nn.Module, config: WanVaeConfig) -> None:
        """`vae` is an `AutoencoderKLWan` of `config`, whose weights say device and dtype."""
        self.vae: Any = vae
        weight = next(vae.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        sizes = config.sizes
        self.latent_channels = sizes.latent_channels
        self.spatial_stride = sizes.spatial_stride
        self.temporal_stride = sizes.temporal_stride
        self.first_latent_frames = sizes.first_latent_frames
        self.decoder_context_frames = sizes.decoder_context_frames
        mean, std = config.latents_mean, config.latents_std
        self._mean_CHW = torch.tensor(mean, device=self.device)[:, None, None]
        self._std_CHW = torch.tensor(std, device=self.device)[:, None, None]

    def streaming_decoder(self) -> "WanStreamingDecoder":
        return WanStreamingDecoder(self)

    def streaming_encoder(self) -> GroupEncoder:
        return GroupEncoder(self, self._encode, lambda: self.nothing_carried(self.vae.encoder))

    def decode_frame(
        self, latents_BCHW: Tensor, carried: list[Any], *, starts_epoch: bool
    ) -> Tensor:
        """One latent frame to video `[B, T, 3, 8 H, 8 W]` in [-1, 1]; changes `carried`."""
        raw = latents_BCHW.to(self.device, torch.float32) * self._std_CHW + self._mean_CHW
        raw_BCFHW = raw[:, :, None].to(self.dtype)
        video_BCTHW: Tensor = self.vae.decoder(
            self.vae.post_quant_conv(raw_BCFHW),
            feat_cache=carried,
            feat_idx=[0],
            first_chunk=starts_epoch,
        )
        return video_BCTHW.clamp(-1, 1).transpose(1, 2)

    def _encode(self, group_BTHWC: Tensor, carried: list[Any]) -> Tensor:
        video_BCTHW = rearrange(to_video(group_BTHWC), "b t h w c -> b c t h w")
        video_BCTHW = video_BCTHW.to(self.device, self.dtype)
        encoded = self.vae.encoder(video_BCTHW, feat_cache=carried, feat_idx=[0])
        moments_BCHW: Tensor = self.vae.quant_conv(encoded)[:, :, 0]
        mean_BCHW = moments_BCHW[:, : self.latent_channels].float()
        return ((mean_BCHW - self._mean_CHW) / self._std_CHW).cpu()[:, None]

    def nothing_carried(self, part: nn.Module) -> list[Any]:
        """What the convolutions of encoder or decoder carry into an epoch's first call."""
        # Each takes one place, and those that see one frame alone leave it empty.
        kind = type(self.vae.quant_conv)
        return [None] * sum(isinstance(module, kind) for module in part.modules())


class WanStreamingDecoder:
    """Latents to pictures; what it carries follows from the last `decoder_context_frames`."""

    _starts_epoch: bool
    _carried: list[Any]

    def __init__(self, codec: WanVideoCodec) -> None:
        self._codec = codec
        self.reset()

    def decode(self, latents_BFCHW: Tensor) -> Tensor:
        """The next pictures, uint8 `[B, T, 8 H, 8 W, 3]`; blocks until they are on the CPU."""
        pieces = [to_bytes(piece).cpu() for piece in self._decoded(latents_BFCHW)]
        return rearrange(torch.cat(pieces, 1), "b t c h w -> b t h w c").contiguous()

    def decode_video(self, latents_BFCHW: Tensor) -> Tensor:
        """The next frames as float32 video `[B, T, 3, 8 H, 8 W]` in [-1, 1]."""
        return torch.cat([piece.float().cpu() for piece in self._decoded(latents_BFCHW)], 1)

    @torch.inference_mode()
    def _decoded(self, latents_BFCHW: Tensor) -> list[Tensor]:
        pieces = []
        for latents_BCHW in latents_BFCHW.unbind(1):
            starts_epoch, self._starts_epoch = self._starts_epoch, False
            pieces.append(
                self._codec.decode_frame(latents_BCHW, self._carried, starts_epoch=starts_epoch)
            )
        return pieces

    def reset(self) -> None:
        """Forget the past: the next latent frame is the first of an epoch."""
        self._starts_epoch = True
        self._carried = self._codec.nothing_carried(self._codec.vae.decoder)
