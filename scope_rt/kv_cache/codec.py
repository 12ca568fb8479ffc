"""A codec turns the last dimension of a tensor into parts and back; it knows no cache.

Codes are computed with the scale as it is stored, so what is lost is what the stored scale says. A
number that is not finite, or whose scale or minimum float16 cannot hold, comes back as NaN, with
all that shared its scale: a broken cache shows. Zeros come back as zeros. Scales never fall below
`LEAST_SCALE`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from scope_contracts.errors import UnsupportedError
from scope_contracts.row_format import INT4_GROUP, CodecKind

LEAST_SCALE = 2.0**-14
"""Float16's smallest normal number; below it a scale would lose its digits."""
INT8_MOST, INT4_MOST, FP8_MOST = 127, 15, 448.0
"""Largest code of each codec."""
_SCALE = torch.float16


@dataclass(frozen=True, slots=True)
class Part:
    """One stored tensor of a plane: `width` numbers of `dtype` a token and head."""

    dtype: torch.dtype
    width: int


class Codec(Protocol):
    """`decode(encode(x))` is x within the codec's bound."""

    def parts(self, dim: int, dtype: torch.dtype) -> tuple[Part, ...]:
        """What is stored for `dim` numbers of `dtype`."""
        ...

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        """The parts of `x [..., dim]`, each `[..., width]`."""
        ...

    def decode(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """`[..., dim]` in `dtype`; identity returns its part itself, not a copy."""
        ...


class Identity:
    """Numbers as they are."""

    def parts(self, dim: int, dtype: torch.dtype) -> tuple[Part, ...]:
        return (Part(dtype, dim),)

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x,)

    def decode(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        (x,) = parts
        return x


class Int8:
    """Symmetric, one scale a row of `dim`; off by half a scale at most."""

    def parts(self, dim: int, dtype: torch.dtype) -> tuple[Part, ...]:
        return (Part(torch.int8, dim), Part(_SCALE, 1))

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        x = _workable(x)
        scale = _stored(x.abs().amax(-1, keepdim=True) / INT8_MOST)
        codes = (x / scale.to(x.dtype)).round_().clamp_(-INT8_MOST, INT8_MOST)
        return codes.nan_to_num_(0).to(torch.int8), scale

    def decode(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        codes, scale = parts
        work = _work_dtype(dtype)
        return codes.to(work).mul_(scale.to(work)).to(dtype)


class Int4:
    """Asymmetric, one scale and minimum for every `INT4_GROUP` channels; two codes a byte.

    Off by half a scale at most. The even channel of a pair lies in the low four bits.
    """

    def parts(self, dim: int, dtype: torch.dtype) -> tuple[Part, ...]:
        groups = dim // INT4_GROUP
        return (Part(torch.uint8, dim // 2), Part(_SCALE, groups), Part(_SCALE, groups))

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        x = _workable(x).unflatten(-1, (-1, INT4_GROUP))
        low, high = x.aminmax(dim=-1)
        # A little lower, so that rounding to float16 cannot lift it above what it must reach.
        low = _finite((low - low.abs() * 2**-10).to(_SCALE))
        scale = _stored((high - low.to(x.dtype)) / INT4_MOST)
        steps = (x - low.to(x.dtype)[..., None]) / scale.to(x.dtype)[..., None]
        codes = steps.round_().clamp_(0, INT4_MOST).nan_to_num_(0).to(torch.uint8).flatten(-2)
        even, odd = codes.unflatten(-1, (-1, 2)).unbind(-1)
        return even | (odd << 4), scale, low

    def decode(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        packed, scale, low = parts
        work = _work_dtype(dtype)
        codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
        x: Tensor = codes.to(work).unflatten(-1, (-1, INT4_GROUP))
        x.mul_(scale.to(work)[..., None]).add_(low.to(work)[..., None])
        return x.flatten(-2).to(dtype)


class Fp8:
    """float8_e4m3fn with one scale a row of `dim`; off by 1/16 of a number at most.

    Numbers below 2^-6 scales, where float8 has no normal numbers, are off by 2^-10 scales.
    """

    def parts(self, dim: int, dtype: torch.dtype) -> tuple[Part, ...]:
        return (Part(torch.uint8, dim), Part(_SCALE, 1))  # bytes: few operations know float8

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        x = _workable(x)
        scale = _stored(x.abs().amax(-1, keepdim=True) / FP8_MOST)
        codes = (x / scale.to(x.dtype)).clamp_(-FP8_MOST, FP8_MOST)
        return codes.to(torch.float8_e4m3fn).view(torch.uint8), scale

    def decode(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        codes, scale = parts
        work = _work_dtype(dtype)
        return codes.view(torch.float8_e4m3fn).to(work).mul_(scale.to(work)).to(dtype)


CODECS: Mapping[CodecKind, Callable[[], Codec]] = MappingProxyType(
    {
        CodecKind.IDENTITY: Identity,
        CodecKind.INT8: Int8,
        CodecKind.INT4: Int4,
        CodecKind.FP8: Fp8,
    }
)
_FP8_DEVICES = ("cpu", "cuda")


def codec_for(kind: CodecKind, device: torch.device) -> Codec:
    """The codec of that kind.

    Raises:
        UnsupportedError: it cannot run on this device.
    """
    if kind is CodecKind.FP8 and device.type not in _FP8_DEVICES:
        raise UnsupportedError(
            f"codec fp8 needs float8_e4m3fn, which torch does not have on {device.type}; use int8"
        )
    return CODECS[kind]()


def _work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precision would round scales, and products twice."""
    return torch.promote_types(dtype, torch.float32)


def _workable(x: Tensor) -> Tensor:
    return x.to(_work_dtype(x.dtype))


def _stored(scale: Tensor) -> Tensor:
    """A scale as it is kept; NaN where float16 cannot hold it."""
    return _finite(scale.clamp_min(LEAST_SCALE).to(_SCALE))


def _finite(kept: Tensor) -> Tensor:
    """NaN in place of infinity."""
    return kept.where(kept.isfinite(), torch.nan)
