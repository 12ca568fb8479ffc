"""What the cache keeps of a chunk is what its last call gave, within what the codec may lose."""

from collections.abc import Callable

import numpy as np

from scope_contracts.row_format import INT4_GROUP, CodecKind
from scope_rt.integrity.tolerance import Array

_SMALLEST_SCALE = 2.0**-14
_SCALE_ROUNDING = 1 + 2.0**-9
"""Scales are kept in float16; twice its rounding, for the quotient has one too."""


def _none(x: Array) -> Array:
    return np.zeros_like(x)


def _int8(x: Array) -> Array:
    scale = np.maximum(abs(x).max(-1, keepdims=True) / 127, _SMALLEST_SCALE)
    return np.broadcast_to(scale / 2 * _SCALE_ROUNDING, x.shape)


def _int4(x: Array) -> Array:
    groups = x.reshape(*x.shape[:-1], -1, INT4_GROUP)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    # The minimum is lowered by 2^-10 of itself, and rounded, so that it is below all numbers.
    scale = np.maximum((high - low + abs(low) * 2.0**-9) / 15, _SMALLEST_SCALE)
    half = np.broadcast_to(scale / 2 * _SCALE_ROUNDING, groups.shape)
    return half.reshape(x.shape)


def _fp8(x: Array) -> Array:
    scale = np.maximum(abs(x).max(-1, keepdims=True) / 448, _SMALLEST_SCALE)
    loss: Array = np.maximum(abs(x) / 16, scale / 1024) * _SCALE_ROUNDING
    return loss


_LOSSES: dict[CodecKind, Callable[[Array], Array]] = {
    CodecKind.IDENTITY: _none,
    CodecKind.INT8: _int8,
    CodecKind.INT4: _int4,
    CodecKind.FP8: _fp8,
}


def largest_loss(x: Array, codec: CodecKind, roundoff: float) -> Array:
    """How far a number `x [..., dim]` may be off once `codec` has kept it.

    `roundoff` is that of the rows' dtype: what is decoded is rounded to it.
    """
    loss = _LOSSES[codec](x)
    if codec is CodecKind.IDENTITY:
        return loss
    rounded: Array = loss + 8 * max(roundoff, 2.0**-24) * abs(x).max(-1, keepdims=True)
    return rounded
