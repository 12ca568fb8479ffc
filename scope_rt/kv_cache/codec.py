"""A codec turns the last dimension of a tensor into parts and back; it knows no cache."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from scope_contracts.row_format import CodecKind


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


CODECS: Mapping[CodecKind, Callable[[], Codec]] = MappingProxyType({CodecKind.IDENTITY: Identity})
