"""A chunk that no model computes, or no decoder shows, is refused before it is shown."""

import torch
from torch import Tensor

from scope_contracts.errors import IntegrityError

_SAMPLE = 64
"""Numbers of a picture that are looked at first, spread over it. Nearly always one of the first is
another: 20 µs less a chunk, between two of which code is cold, than to look at a run of them."""


def check_latents(chunk: int, latents_BFCHW: Tensor, *, repeats: bool, limit: float | None) -> None:
    """Refuse latents that are not finite, beyond `limit`, constant, or those of the chunk before.

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
    if repeats:
        raise IntegrityError(
            f"chunk {chunk}: the latents are those of the chunk before, bit for bit"
        )


def is_constant(frames_BTHWC: Tensor) -> bool:
    """Whether every number of the picture is the same: a fade, or a decoder that is broken."""
    pixels = frames_BTHWC.numpy()
    first = pixels.item(0)
    for at in range(0, pixels.size, pixels.size // _SAMPLE + 1):
        if pixels.item(at) != first:
            return False
    return bool((pixels == first).all())


def check_decoded(chunk: int, frames_BTHWC: Tensor, again_BTHWC: Tensor) -> None:
    """Compare frames with what another decoder made of the same latents, bit for bit.

    Raises:
        IntegrityError: naming the chunk, and the first frame that differs.
    """
    if frames_BTHWC.shape != again_BTHWC.shape:
        got, want = list(frames_BTHWC.shape), list(again_BTHWC.shape)
        raise IntegrityError(f"chunk {chunk}: rank 0: decoded frames {got}, decoded again {want}")
    if not torch.equal(frames_BTHWC, again_BTHWC):
        differs = frames_BTHWC != again_BTHWC
        frame = int(differs.flatten(2).any(2).any(0).nonzero()[0])
        raise IntegrityError(
            f"chunk {chunk}: rank 0: its latents were decoded to another picture than when decoded "
            f"again: frame {frame} differs first, {int(differs.sum())} numbers in all"
        )
