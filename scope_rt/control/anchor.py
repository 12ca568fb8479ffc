"""An anchor is a latent frame made of pictures that were shown, as if a video began with them.

Models whose context begins with one were trained on that.
"""

from typing import Protocol

import torch
from torch import Tensor

from scope_rt.tensors import crc32_of


class AnchorEncoder(Protocol):
    """The latent frame `[B, 1, C, H/8, W/8]` of a video's first frames, uint8 `[B, T, H, W, 3]`."""

    def __call__(self, frames_BTHWC: Tensor) -> Tensor: ...


class AnchorFrames:
    """The newest decoded frames, each with its CRC-32 since it came in.

    `first_latent_frames` and `temporal_stride` are the codec's, in frames.
    """

    def __init__(
        self,
        encode: AnchorEncoder,
        *,
        num_latents: int,
        first_latent_frames: int,
        temporal_stride: int,
    ) -> None:
        """`num_latents` latent frames before the next chunk are kept, the anchor's the oldest."""
        self._encode, self._num_first = encode, first_latent_frames
        self._num_kept = first_latent_frames + temporal_stride * (num_latents - 1)
        self.reset()

    def reset(self) -> None:
        """A new epoch: no frame of the old one is kept."""
        self.frames = torch.empty(0, dtype=torch.uint8)
        self._crc32s: tuple[int, ...] = ()

    def remember(self, frames_BTHWC: Tensor) -> None:
        """Keep a chunk's frames."""
        before = [self.frames] if len(self.frames) else []
        frames = torch.cat([*before, frames_BTHWC], dim=1)
        first = max(0, frames.shape[1] - self._num_kept)
        self.frames = frames[:, first:]
        self._crc32s = (*self._crc32s, *_crc32s_of(frames_BTHWC))[first:]

    def latent(self, dtype: torch.dtype) -> Tensor:
        """The anchor `[B, 1, C, H/8, W/8]`, of the oldest frames; encoded anew each time."""
        return self._encode(self.frames[:, : self._num_first]).to(dtype)

    def evidence(self) -> tuple[str, str, str]:
        """What is compared of the frames it is made of, its digest now, and when they came in."""
        now, noted = _crc32s_of(self.frames[:, : self._num_first]), self._crc32s[: self._num_first]
        return "frames of the anchor", " ".join(map(str, now)), " ".join(map(str, noted))


def _crc32s_of(frames_BTHWC: Tensor) -> tuple[int, ...]:
    """One for each picture."""
    return tuple(crc32_of(frame.numpy()) for frame in frames_BTHWC.unbind(1))
