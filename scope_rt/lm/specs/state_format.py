"""What a recurrent layer remembers has one size, however long the sequence is."""

import math
from dataclasses import dataclass, replace
from typing import Self

from scope_contracts.errors import CacheError, UserInputError, mismatch
from scope_contracts.tensor_spec import DType


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePart:
    """One tensor of the state of one layer and sequence."""

    name: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.shape or min(self.shape) < 1:
            want = "sizes of at least 1"
            raise CacheError(mismatch(f"state {self.name}", got=self.shape, want=want))


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFormat:
    """The state of one layer and sequence, as all ranks together (`shard`: as one rank) hold it."""

    parts: tuple[StatePart, ...]
    dtype: DType
    num_shares: int = 1
    """Equal shares that the first axis of every part falls into, one or more to a rank."""

    @classmethod
    def mamba2(
        cls,
        *,
        num_heads: int,
        head_dim: int,
        state_size: int,
        num_groups: int,
        conv_kernel: int,
        dtype: DType,
    ) -> Self:
        """Mamba-2 (Dao & Gu, 2024): the inputs that the convolution still needs, and the SSM state.

        Raises `CacheError` for a size below 1; a convolution needs a kernel of at least 2.
        """
        channels = num_heads * head_dim + 2 * num_groups * state_size
        conv = StatePart(name="conv", shape=(channels, conv_kernel - 1))
        ssm = StatePart(name="ssm", shape=(num_heads, head_dim, state_size))
        shares = math.gcd(num_heads, num_groups)
        return cls(parts=(conv, ssm), dtype=dtype, num_shares=shares)

    def shard(self, tp_degree: int) -> Self:
        """What one of `tp_degree` ranks holds.

        Raises `UserInputError` when the shares cannot be dealt out evenly.
        """
        if tp_degree < 1 or self.num_shares % tp_degree:
            want = f"a divisor of {self.num_shares}, as the states' heads and groups allow"
            raise UserInputError(mismatch("tp", got=tp_degree, want=want, fix="change --tp"))
        parts = tuple(
            replace(part, shape=(part.shape[0] // tp_degree, *part.shape[1:]))
            for part in self.parts
        )
        return replace(self, parts=parts, num_shares=self.num_shares // tp_degree)

    @property
    def bytes_per_layer(self) -> int:
        """Bytes of one sequence in one layer."""
        return sum(math.prod(part.shape) for part in self.parts) * self.dtype.num_bytes
