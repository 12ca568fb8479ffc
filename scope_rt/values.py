"""A chunk of numbers that no model computes is refused before it is shown."""

import torch
from torch import Tensor

from scope_contracts.errors import IntegrityError

_SAMPLE = 4096
"""Numbers of a picture that are looked at first."""


def check_latents(
    chunk: int, latents_BFCHW: Tensor, *, previous: Tensor | None, limit: float | None
) -> None:
    """Refuse latents that are not finite, beyond `limit`, constant, or the `previous` chunk's.

    Raises:
        IntegrityError: naming the chunk and what is wrong.
    """
    low, high = (float(end) for end in latents_BFCHW.aminmax())  # NaN where there is one
    reach = max(abs(low), abs(high))
    if not reach < float("inf"):
        num = int((~latents_BFCHW.isfinite()).sum())
        raise IntegrityError(
            f"chunk {chunk}: {num} of {latents_BFCHW.numel()} latents are not finite"
        )
    if limit is not None and reach > limit:
        raise IntegrityError(
            f"chunk {chunk}: a latent is {low if -low > high else high:g}, beyond the recipe's "
            f"latent_limit {limit:g}"
        )
    if low == high:
        raise IntegrityError(f"chunk {chunk}: all latents are {low:g}")
    if previous is not None and torch.equal(latents_BFCHW, previous):
        raise IntegrityError(
            f"chunk {chunk}: the latents are those of the chunk before, bit for bit"
        )


def check_picture(chunk: int, latents_BFCHW: Tensor, frames_BTHWC: Tensor) -> None:
    """Refuse frames of one single value, decoded from latents that are not constant.

    Raises:
        IntegrityError: naming the chunk.
    """
    flat = frames_BTHWC.reshape(-1)
    for looked_at in (flat[:: max(1, flat.numel() // _SAMPLE)], flat):
        low, high = looked_at.aminmax()
        if low != high:
            return
    if latents_BFCHW.min() != latents_BFCHW.max():
        raise IntegrityError(
            f"chunk {chunk}: every number of the picture is {int(low)}, and the latents are not "
            "constant; the decoder is broken"
        )
