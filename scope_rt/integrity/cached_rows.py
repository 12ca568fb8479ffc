"""What the cache keeps of a chunk is what its last call gave, within what the codec may lose."""

from collections.abc import Callable

import torch
from torch import Tensor

from scope_contracts.row_format import INT4_GROUP, CodecKind

_SMALLEST_SCALE = 2.0**-14
_SCALE_ROUNDING = 1 + 2.0**-9
"""Scales are kept in float16; twice its rounding, for the quotient has one too."""


def _none(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


def _int8(x: Tensor) -> Tensor:
    scale = (_largest(x) / 127).clamp_min(_SMALLEST_SCALE)
    half: Tensor = scale / 2 * _SCALE_ROUNDING
    return half.expand_as(x)


def _int4(x: Tensor) -> Tensor:
    groups: Tensor = x.unflatten(-1, (-1, INT4_GROUP))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    # The minimum is lowered by 2^-10 of itself, and rounded, so that it is below all numbers.
    scale = ((high - low + abs(low) * 2.0**-9) / 15).clamp_min(_SMALLEST_SCALE)
    half: Tensor = scale / 2 * _SCALE_ROUNDING
    return half.expand_as(groups).reshape(x.shape)


def _fp8(x: Tensor) -> Tensor:
    scale = (_largest(x) / 448).clamp_min(_SMALLEST_SCALE)
    return torch.maximum(abs(x) / 16, scale / 1024) * _SCALE_ROUNDING


def _largest(x: Tensor) -> Tensor:
    """Of each row, `[..., 1]`."""
    return abs(x).amax(-1, keepdim=True)


_LOSSES: dict[CodecKind, Callable[[Tensor], Tensor]] = {
    CodecKind.IDENTITY: _none,
    CodecKind.INT8: _int8,
    CodecKind.INT4: _int4,
    CodecKind.FP8: _fp8,
}


def largest_loss(x: Tensor, codec: CodecKind, roundoff: float) -> Tensor:
    """How far a number `x [..., dim]` may be off once `codec` has kept it.

    `roundoff` is that of the rows' dtype: what is decoded is rounded to it.
    """
    loss = _LOSSES[codec](x)
    if codec is CodecKind.IDENTITY:
        return loss
    return loss + 8 * max(roundoff, 2.0**-24) * _largest(x)
