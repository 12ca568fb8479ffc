"""A codec as users write them: a module with parameters, whose epochs begin with one frame, as
Wan's do; not a test itself."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZES = {
    "latent_channels": 16,
    "spatial_stride": 8,
    "temporal_stride": 4,
    "first_latent_frames": 1,
    "decoder_context_frames": 1,
}


class ParameterCodec(nn.Module):
    """Shows a latent cell as a square of one colour; `spoil` changes what it gives."""

    latent_channels = 16
    spatial_stride = 8
    temporal_stride = 4
    first_latent_frames = 1
    decoder_context_frames = 1

    def __init__(self, spoil: Callable[[Any], Any] = lambda given: given) -> None:
        super().__init__()
        self.contrast, self.spoil = nn.Parameter(torch.ones(3, 1, 1)), spoil

    def streaming_decoder(self) -> "_Decoder":
        return _Decoder(self)

    def streaming_encoder(self) -> "_Encoder":
        return _Encoder(self)


class _Decoder:
    """Keeps how many latent frames it has seen, in a tensor that is changed in place."""

    def __init__(self, codec: ParameterCodec) -> None:
        self._codec, self._num_seen = codec, torch.zeros(1)

    def decode(self, latents_BFCHW: Tensor) -> Tensor:
        colours = (latents_BFCHW[:, :, :3] * self._codec.contrast).tanh() * 127.5 + 127.5
        frames = colours.round().to(torch.uint8).movedim(2, -1).repeat_interleave(4, 1)
        frames = frames.repeat_interleave(8, 2).repeat_interleave(8, 3)
        num_left_out = 0 if self._num_seen else 3
        self._num_seen = self._num_seen + latents_BFCHW.shape[1]
        return self._codec.spoil(frames[:, num_left_out:])  # type: ignore[no-any-return]

    def reset(self) -> None:
        self._num_seen.zero_()


class _Encoder:
    """Of one frame: the first of an epoch."""

    def __init__(self, codec: ParameterCodec) -> None:
        self._codec = codec

    def encode(self, frames_BTHWC: Tensor) -> Tensor:
        cells = (frames_BTHWC[:, :, 4::8, 4::8].float() / 127.5 - 1).clamp(-0.99, 0.99).atanh()
        latents = cells.movedim(-1, 2) / self._codec.contrast
        return self._codec.spoil(F.pad(latents, (0, 0, 0, 0, 0, 13)))  # type: ignore[no-any-return]

    def reset(self) -> None: ...
