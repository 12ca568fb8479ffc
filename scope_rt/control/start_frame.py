"""A stream may begin with a picture: its clean latents are chunk 0, and nothing is denoised there.

Rank0 encodes it, as the beginning of a video; all others are given its latents.
"""

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from scope_contracts.errors import UserInputError
from scope_rt.tensors import sha256_of
from scope_rt.vae.checked import CheckedAnchorEncoder
from scope_rt.vae.codec import VideoCodec
from scope_rt.video.start_picture import StartPicture


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StartFrame:
    """Clean `latents` `[B, 1, C, H/8, W/8]` in the stream's dtype, with their digest since they
    were made; `image` and `image_sha256` are as `log_records.StartFrame` has them."""

    image: str
    image_sha256: str
    latents: Tensor
    latents_sha256: str = ""

    def __post_init__(self) -> None:
        if not self.latents_sha256:
            object.__setattr__(self, "latents_sha256", sha256_of(self.latents))


def encoded(
    picture: StartPicture, codec: VideoCodec, *, batch: int, dtype: torch.dtype
) -> StartFrame:
    """`picture` as the first latent frame of a video in which it stands still.

    Raises:
        UserInputError: the codec gives something else than it promises, or no finite numbers.
    """
    frame_HWC = torch.from_numpy(picture.rgb_HWC)
    frames = frame_HWC.expand(batch, codec.first_latent_frames, *frame_HWC.shape).contiguous()
    latents = CheckedAnchorEncoder(codec)(frames).to(dtype).cpu()
    if not bool(latents.isfinite().all()):
        raise UserInputError(
            f"image {picture.path}: the codec encodes it to numbers that are not finite; choose "
            "another codec_dtype or dtype"
        )
    image = os.path.abspath(picture.path)
    return StartFrame(image=image, image_sha256=picture.sha256, latents=latents)
