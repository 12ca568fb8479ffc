"""What one cached token is made of is a value, so its bytes can be counted before any exist."""

from dataclasses import dataclass, replace
from enum import StrEnum

from scope_contracts.errors import CacheError, UserInputError, mismatch
from scope_contracts.tensor_spec import DType

INT4_GROUP = 16
"""Channels that share one scale and one minimum in the int4 codec."""


class CodecKind(StrEnum):
    """How the numbers of a row are stored; rows come back in the dtype they were given in."""

    IDENTITY = "identity"
    INT8 = "int8"
    """Symmetric, one float16 scale a token and head."""
    INT4 = "int4"
    """Asymmetric, one float16 scale and minimum for every `INT4_GROUP` channels."""
    FP8 = "fp8"
    """float8_e4m3fn, one float16 scale a token and head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """One tensor of a token: keys, values, a latent, a RoPE key: `[heads, dim]`."""

    name: str
    heads: int
    dim: int
    head_sharded: bool = True
    """Whether tensor-parallel ranks share the heads; latents are replicated instead."""

    def __post_init__(self) -> None:
        if self.heads < 1 or self.dim < 1:
            got = (self.heads, self.dim)
            raise CacheError(mismatch(f"{self.name} heads and dim", got=got, want="at least 1"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFormat:
    """One token of one layer, as all ranks together (`shard`: as one rank) hold it.

    Raises `UserInputError` for a codec that does not fit the planes.
    """

    planes: tuple[Plane, ...]
    dtype: DType
    """Of the rows as a model gives and gets them."""
    codec: CodecKind = CodecKind.IDENTITY

    def __post_init__(self) -> None:
        if self.codec is CodecKind.IDENTITY:
            return
        for plane in self.planes:
            if not plane.head_sharded:
                raise UserInputError(
                    f"codec {self.codec} takes full keys and values, and {plane.name} is a latent "
                    "that all heads share; keep latent caches at codec identity"
                )
            if self.codec is CodecKind.INT4 and plane.dim % INT4_GROUP:
                want = f"a multiple of {INT4_GROUP}"
                raise UserInputError(
                    mismatch(f"{plane.name} dim", got=plane.dim, want=want, fix="use int8")
                )

    @classmethod
    def full(
        cls,
        *,
        heads: int,
        head_dim: int,
        dtype: DType,
        value_dim: int | None = None,
        codec: CodecKind = CodecKind.IDENTITY,
    ) -> "RowFormat":
        """Keys and values of every (K/V) head; `value_dim` is `head_dim` unless told."""
        values = Plane(name="values", heads=heads, dim=value_dim or head_dim)
        keys = Plane(name="keys", heads=heads, dim=head_dim)
        return cls(planes=(keys, values), dtype=dtype, codec=codec)

    @classmethod
    def latent(cls, *, rank: int, rope_dim: int, dtype: DType) -> "RowFormat":
        """MLA (DeepSeek-V2, section 2.1): a latent of `rank` and one RoPE key for all heads."""
        latent = Plane(name="latent", heads=1, dim=rank, head_sharded=False)
        rope_key = Plane(name="rope_key", heads=1, dim=rope_dim, head_sharded=False)
        return cls(planes=(latent, rope_key), dtype=dtype)

    def shard(self, tp_degree: int) -> "RowFormat":
        """What one of `tp_degree` ranks holds.

        Raises `UserInputError` when sharded heads do not divide.
        """
        for plane in self.planes:
            if plane.head_sharded and (tp_degree < 1 or plane.heads % tp_degree):
                want = f"a divisor of the model's {plane.heads} heads"
                raise UserInputError(mismatch("tp", got=tp_degree, want=want, fix="change --tp"))
        planes = tuple(
            replace(plane, heads=plane.heads // tp_degree) if plane.head_sharded else plane
            for plane in self.planes
        )
        return replace(self, planes=planes)

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one token in one layer, scales included."""
        return sum(plane.heads * self._head_bytes(plane.dim) for plane in self.planes)

    def _head_bytes(self, dim: int) -> int:
        scale = DType.FLOAT16.num_bytes
        match self.codec:
            case CodecKind.IDENTITY:
                return dim * self.dtype.num_bytes
            case CodecKind.INT8 | CodecKind.FP8:
                return dim + scale
            case CodecKind.INT4:
                return dim // 2 + 2 * scale * (dim // INT4_GROUP)
