"""What the runtime asks of a video codec; a stream's state lives in the streaming objects only.

Chunked use equals whole use: feeding a video in pieces gives the same bits as feeding it at once.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class StreamingDecoder(Protocol):
    """Latents to pictures, with whatever memory the codec needs."""

    def decode(self, latents_BFCHW: Tensor) -> Tensor:
        """The next frames, uint8 `[B, T, H, W, 3]`, in memory that no later call writes to: they
        are encoded while the next ones are decoded."""
        ...

    def reset(self) -> None:
        """Forget the past: the next latent is the first of an epoch."""
        ...


class StreamingEncoder(Protocol):
    """Pictures to latents, with whatever memory the codec needs."""

    def encode(self, frames_BTHWC: Tensor) -> Tensor:
        """The next latents `[B, F, C, H/8, W/8]` of uint8 frames."""
        ...

    def reset(self) -> None:
        """Forget the past: the next frame is the first of an epoch."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSizes:
    """What every rank must know of a codec that only some load; named as in `VideoCodec`."""

    latent_channels: int
    spatial_stride: int
    temporal_stride: int
    first_latent_frames: int
    decoder_context_frames: int


class VideoCodec(Protocol):
    """A video autoencoder that works in a stream."""

    @property
    def latent_channels(self) -> int:
        """Numbers per latent cell."""
        ...

    @property
    def spatial_stride(self) -> int:
        """Pixels per latent cell, each way."""
        ...

    @property
    def temporal_stride(self) -> int:
        """Frames per latent frame, after the first of an epoch."""
        ...

    @property
    def first_latent_frames(self) -> int:
        """Frames of an epoch's first latent frame: 1 for Wan, 4 for the embedded codec."""
        ...

    @property
    def decoder_context_frames(self) -> int:
        """Latent frames before a latent frame on which its pictures depend.

        A decoder after `reset`, given latents i - n .. i - 1 of an epoch (fewer where there are
        fewer) for n = `decoder_context_frames`, decodes latent i to the same bits as one that was
        given all from 0 on. It is counted from latent i backwards, over all layers: a causal
        convolution over k latent frames adds k - 1. 0 for a decoder without memory, 1 for the
        embedded codec.
        """
        ...

    def streaming_decoder(self) -> StreamingDecoder: ...

    def streaming_encoder(self) -> StreamingEncoder: ...


def num_frames(codec: CodecSizes | VideoCodec, num_latents: int, *, starts_epoch: bool) -> int:
    """Frames of `num_latents` latent frames, those of an epoch's beginning or any later ones."""
    if not starts_epoch:
        return codec.temporal_stride * num_latents
    return codec.first_latent_frames + codec.temporal_stride * (num_latents - 1)
