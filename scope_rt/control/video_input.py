"""A chunk may begin with pictures instead of pure noise: the newest that there are, never older
ones that wait.

As in SDEdit (Meng et al., 2022) and StreamDiffusionV2 (Feng et al., 2025), pictures are encoded,
mixed with the chunk's noise up to `noise_scale`, and denoised from that level on. Rank0 alone
encodes; the ranks are given clean latents, and mix them with noise that each of them verifies.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scope_contracts.errors import UserInputError
from scope_rt.tensors import sha256_of
from scope_rt.vae.codec import CodecSizes, StreamingEncoder, num_frames


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InputPictures:
    """Pictures for one chunk, uint8 `[T, H, W, 3]` of the stream's size, oldest first; of fewer
    than the chunk shows the oldest is repeated, of more the newest are taken.

    Raises:
        UserInputError: there is none, or the scale is out of range.
    """

    frames: NDArray[np.uint8]
    noise_scale: float
    """Sigma of the noise that the pictures are mixed with, 0 < scale < 1: 0.1 keeps them, 0.9
    keeps little."""

    def __post_init__(self) -> None:
        if not 0 < self.noise_scale < 1:
            raise UserInputError(f"noise_scale: got {self.noise_scale:g}, want 0 < noise_scale < 1")
        if self.frames.ndim != 4 or not len(self.frames) or self.frames.dtype != np.uint8:
            raise UserInputError("video input: give one picture or more, uint8 [T, H, W, 3]")


class VideoInput(Protocol):
    """Asked by the thread that iterates a stream, when a chunk is planned."""

    def newest(self, num_frames: int) -> InputPictures | None:
        """The newest pictures, `num_frames` where there are as many; None begins the chunk with
        noise. Must not block."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InputLatents:
    """What a chunk begins with: clean `latents` `[B, F, C, H/8, W/8]` on the CPU, with their digest
    since they were made."""

    latents: Tensor
    noise_scale: float
    latents_sha256: str


class InputEncoder:
    """Encodes what comes chunk by chunk as one video, which begins anew with each epoch."""

    def __init__(
        self, encoder: StreamingEncoder, sizes: CodecSizes, *, frames_per_block: int
    ) -> None:
        self._encoder, self._sizes, self._frames_per_block = encoder, sizes, frames_per_block
        self._has_begun = False

    def num_frames(self, *, starts_epoch: bool) -> int:
        """Pictures that a chunk shows."""
        return num_frames(self._sizes, self._frames_per_block, starts_epoch=starts_epoch)

    def encode(
        self, given: InputPictures, *, starts_epoch: bool, dtype: torch.dtype, size: tuple[int, int]
    ) -> InputLatents:
        """Blocks for what the codec takes. `size` is height and width of the stream in pixels.

        Raises:
            UserInputError: the pictures have another size.
        """
        if given.frames.shape[1:] != (*size, 3):
            raise UserInputError(
                f"video input: got pictures {list(given.frames.shape[1:])}, want {[*size, 3]}; "
                "scale them to the stream's size"
            )
        frames = self._of_length(given.frames, self.num_frames(starts_epoch=starts_epoch))
        if starts_epoch or not self._has_begun:
            self._encoder.reset()
        if not self._has_begun and not starts_epoch:
            # In the middle of an epoch: its first group is of another length.
            first = np.repeat(frames[:1], self._sizes.first_latent_frames, axis=0)
            self._encoder.encode(torch.from_numpy(first)[None])
        self._has_begun = True
        latents = self._encoder.encode(torch.from_numpy(frames)[None]).to(dtype)
        return InputLatents(
            latents=latents, noise_scale=given.noise_scale, latents_sha256=sha256_of(latents)
        )

    @staticmethod
    def _of_length(frames_THWC: NDArray[np.uint8], length: int) -> NDArray[np.uint8]:
        newest = frames_THWC[-length:]
        missing = length - len(newest)
        repeated = np.repeat(newest[:1], missing, axis=0)
        return np.ascontiguousarray(np.concatenate([repeated, newest]))
