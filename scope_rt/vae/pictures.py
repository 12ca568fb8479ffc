"""Pictures are bytes, video is numbers in [-1, 1]; both directions stand here alone."""

import torch
from torch import Tensor


def to_bytes(video: Tensor) -> Tensor:
    """Video in [-1, 1] to uint8 pictures; each number to the nearest of 256."""
    return ((video.float() + 1) * 127.5).round().to(torch.uint8)


def to_video(pictures: Tensor) -> Tensor:
    """Uint8 pictures to float32 video in [-1, 1]."""
    return pictures.float() / 127.5 - 1
