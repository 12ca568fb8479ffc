"""An all-reduce gives the sum of what it was given, whatever a rank believes it has got.

A sum with signs is taken of each rank's own part and of what came back: neighbouring tokens have
opposite signs, channels fixed pseudo-random ones. `check_sums` adds up the parts of all ranks.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from scope_contracts.arithmetic import ReducedSum
from scope_contracts.errors import IntegrityError
from scope_rt.integrity.linear_sums import signs


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
        if not all(map(math.isfinite, (given, got, length))):
            raise IntegrityError(f"{name}: what ranks add up is not finite ({given:g}, {got:g})")
        return ReducedSum(
            name=name, given=given, got=got, squares=length**2, roundoff=self.roundoff
        )


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
