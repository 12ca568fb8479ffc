"""An all-reduce gives the sum of what it was given, whatever a rank believes it has got.

A sum with signs is taken of each rank's own part and of what came back: neighbouring tokens have
opposite signs, channels fixed pseudo-random ones. `check_sums` adds up the parts of all ranks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from scope_contracts.arithmetic import ReducedSum
from scope_contracts.errors import IntegrityError
from scope_rt.integrity.block_sums import BlockSums
from scope_rt.integrity.call_weights import REDUCED
from scope_rt.integrity.linear_sums import signs
from scope_rt.integrity.tolerance import SQUARES_ROUNDOFF, Rounding


@dataclass(frozen=True, slots=True)
class ReducedPair:
    """Signed sums of one all-reduce, on its device until `on_host`."""

    given: Tensor
    length: Tensor
    """Root of the squares of what was given."""
    roundoff: float
    got: Tensor | None = None

    @classmethod
    def of(cls, given: Tensor) -> "ReducedPair":
        length = torch.linalg.vector_norm(given, dtype=_at_least_single(given))
        return cls(signed_sum(given), length, torch.finfo(given.dtype).eps / 2)

    def with_result(self, got: Tensor) -> "ReducedPair":
        return replace(self, got=signed_sum(got))

    def on_host(self, name: str) -> ReducedSum:
        """Raises `IntegrityError` where a number is not finite: it cannot be told to others."""
        assert self.got is not None
        given, got, length = torch.stack((self.given, self.got, self.length.double())).tolist()
        return _reduced_sum(name, given, got, length, self.roundoff)


def _at_least_single(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


@lru_cache(maxsize=16)
def _channel_signs(count: int, device: torch.device) -> Tensor:
    return torch.from_numpy(signs(count)).to(device)


def signed_sum(x: Tensor) -> Tensor:
    """In float64, without a copy of `x`: even rows less odd ones, then channels by their signs."""
    rows = x.reshape(-1, x.shape[-1])
    by_channel = rows[0::2].sum(0, dtype=torch.float64)
    by_channel -= rows[1::2].sum(0, dtype=torch.float64)
    return by_channel @ _channel_signs(rows.shape[-1], x.device)


@dataclass(frozen=True, slots=True)
class ReducedSums:
    """One kind of all-reduce of some calls of blocks; on its device until `on_host`."""

    names: Sequence[str]
    sums_R3: Tensor
    """Given, got, and the length of what was given."""
    roundoff: float

    @classmethod
    def of(
        cls, names: Sequence[str], sums: tuple[Tensor, Tensor], lengths_RT: Tensor, roundoff: float
    ) -> "ReducedSums":
        """`sums` are those of the channels of each token, given and got: `[R, T]`."""
        given, got = (_by_turns(each) for each in sums)
        length = torch.linalg.vector_norm(lengths_RT.double(), dim=-1)
        return cls(names, torch.stack((given, got, length), dim=-1), roundoff)

    def on_host(self) -> list[ReducedSum]:
        """Raises `IntegrityError` where a number is not finite: it cannot be told to others."""
        return [
            _reduced_sum(name, given, got, length, self.roundoff)
            for name, (given, got, length) in zip(self.names, self.sums_R3.tolist(), strict=True)
        ]


def reduced_sums_of(seen: BlockSums, rounding: Rounding, num_ranks: int) -> list[ReducedSums]:
    """Of all tokens; none where there are no other ranks."""
    if num_ranks == 1:
        return []
    where = [f"call {each.audit.call}, layer {each.audit.layer}" for each in seen.records]
    made = []
    for number, name in enumerate(("sums of squares of q and k", "sum of squares of the text's q")):
        given, got = (seen.squares(number, index).flatten(1) for index in (0, 1))
        names = [f"{each}, {name}" for each in where]
        made.append(ReducedSums.of(names, (given, got), given, SQUARES_ROUNDOFF))
    # Sums of channels are rounded too, which is more than parts are where channels are many.
    roundoff = rounding.stored + rounding.work * math.sqrt(seen.weights.config.dim)
    for index, what in enumerate(REDUCED):
        sums = seen.of.given_RSKT[:, index, 0], seen.of.got_RSKT[:, index, 0]
        names = [f"{each}, {what.value}" for each in where]
        made.append(ReducedSums.of(names, sums, seen.of.given_lengths_RST[:, index], roundoff))
    return made


def _by_turns(sums_RT: Tensor) -> Tensor:
    """Even tokens less odd ones."""
    even = sums_RT[:, 0::2].sum(-1, dtype=torch.float64)
    return even - sums_RT[:, 1::2].sum(-1, dtype=torch.float64)


def _reduced_sum(name: str, given: float, got: float, length: float, roundoff: float) -> ReducedSum:
    if not all(map(math.isfinite, (given, got, length))):
        raise IntegrityError(f"{name}: what ranks add up is not finite ({given:g}, {got:g})")
    return ReducedSum(name=name, given=given, got=got, squares=length**2, roundoff=roundoff)
