"""Pictures wait until a group is complete: the first of an epoch alone, then `temporal_stride`."""

import torch
from torch import Tensor

from scope_contracts.errors import UserInputError
from scope_rt.vae.codec import CodecSizes, VideoCodec


class PictureGroups:
    """Cuts a stream of pictures where its codec does, wherever they were cut before."""

    def __init__(self, codec: CodecSizes | VideoCodec) -> None:
        self._codec = codec
        self._num_wanted = codec.first_latent_frames
        self._waiting_BTHWC: Tensor | None = None

    def completed_by(self, pictures_BTHWC: Tensor) -> list[Tensor]:
        """The groups that are complete with these pictures, perhaps none.

        Raises:
            UserInputError: height or width is no multiple of the spatial stride.
        """
        height, width = pictures_BTHWC.shape[2:4]
        stride = self._codec.spatial_stride
        if height % stride or width % stride:
            raise UserInputError(
                f"pictures: got {height}x{width}, want multiples of {stride}; pad or crop the input"
            )
        if self._waiting_BTHWC is not None:
            pictures_BTHWC = torch.cat([self._waiting_BTHWC, pictures_BTHWC], 1)
        groups = []
        while pictures_BTHWC.shape[1] >= self._num_wanted:
            groups.append(pictures_BTHWC[:, : self._num_wanted])
            pictures_BTHWC = pictures_BTHWC[:, self._num_wanted :]
            self._num_wanted = self._codec.temporal_stride
        self._waiting_BTHWC = pictures_BTHWC.clone()
        return groups
