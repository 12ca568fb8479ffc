"""Pictures wait until a group is complete: the first of an epoch alone, then `temporal_stride`."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from scope_contracts.errors import UserInputError
from scope_rt.vae.codec import VideoCodec


class GroupEncoder:
    """Pictures to latents, a group at a time, wherever they were cut before."""

    _num_wanted: int
    _waiting_BTHWC: Tensor | None
    _carried: list[Any]

    def __init__(
        self,
        codec: VideoCodec,
        encode: Callable[[Tensor, list[Any]], Tensor],
        nothing_carried: Callable[[], list[Any]],
    ) -> None:
        """`encode` makes the next group, uint8 `[B, T, H, W, 3]`, a latent frame `[B, 1, C, H/8,
        W/8]` on the CPU, and changes what is carried; into an epoch's first that is
        `nothing_carried`."""
        self._codec, self._encode, self._nothing_carried = codec, encode, nothing_carried
        self.reset()

    @torch.inference_mode()
    def encode(self, frames_BTHWC: Tensor) -> Tensor:
        """The latents `[B, F, C, H/8, W/8]` of the groups that these pictures complete, perhaps
        none; blocks until they are on the CPU.

        Raises:
            UserInputError: height or width is no multiple of the spatial stride.
        """
        batch, _, height, width, _ = frames_BTHWC.shape
        stride = self._codec.spatial_stride
        if height % stride or width % stride:
            raise UserInputError(
                f"pictures: got {height}x{width}, want multiples of {stride}; pad or crop the input"
            )
        none = torch.empty(batch, 0, self._codec.latent_channels, height // stride, width // stride)
        groups = self._completed_by(frames_BTHWC)
        return torch.cat([none, *(self._encode(group, self._carried) for group in groups)], 1)

    def reset(self) -> None:
        """Forget the past, and pictures that wait: the next one is the first of an epoch."""
        self._num_wanted, self._waiting_BTHWC = self._codec.first_latent_frames, None
        self._carried = self._nothing_carried()

    def _completed_by(self, pictures_BTHWC: Tensor) -> Iterator[Tensor]:
        if self._waiting_BTHWC is not None:
            pictures_BTHWC = torch.cat([self._waiting_BTHWC, pictures_BTHWC], 1)
        while pictures_BTHWC.shape[1] >= self._num_wanted:
            yield pictures_BTHWC[:, : self._num_wanted]
            pictures_BTHWC = pictures_BTHWC[:, self._num_wanted :]
            self._num_wanted = self._codec.temporal_stride
        self._waiting_BTHWC = pictures_BTHWC.clone()
