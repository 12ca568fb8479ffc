"""How far rounding may take a number is worked out beside the number, from the arithmetic.

A rounding error is a random number of mean 0, at most u of what is rounded: u / sqrt(3) of it as
its standard deviation. Errors here are `LAMBDA` standard deviations, and independent ones add up by
the root of their squares or, where that saves nothing, by their sum.

For a dot product of n terms t_j with the sum s, in any order that does not depend on the values:
partial sum k is on average (k / n) s, with the variance k (1 - k / n) mean(t^2). The errors of all
n additions then have the variance u^2 (n s^2 / 3 + n^2 mean(t^2) / 6). That is the bound lambda
sqrt(n) u of Higham and Mary (SIAM J. Sci. Comput. 41, 2019, theorem 3.1) where all terms have one
sign, and free of n where they have not (the same, 2020, "Sharper probabilistic backward error
analysis"), so that fewer bits in the products show in long sums too. Sums in blocks are off by
less.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from scope_contracts.arithmetic import LAMBDA
from scope_rt.numerics import float32_products

Array = NDArray[np.float64]
SQUARES_ROUNDOFF = 2.0**-24
"""Sums of squares are taken in float32, whatever the model's dtype."""
SHARED = 16.0
"""Roundings that all numbers of a token share: mean, variance and root of a norm."""
_PRODUCTS = {"none": 2.0**-24, "ieee": 2.0**-24, "tf32": 2.0**-11, "bf16": 2.0**-8}
"""Unit roundoff of float32 products, by what PyTorch rounds them to."""


@dataclass(frozen=True, slots=True)
class Rounding:
    """Unit roundoffs of one model dtype: of products and sums, and of what is stored."""

    work: float
    stored: float

    @classmethod
    def of(cls, dtype: torch.dtype) -> "Rounding":
        """As the process is set: float32 products may be rounded to TF32 or bfloat16 first."""
        work = torch.finfo(torch.promote_types(dtype, torch.float32)).eps / 2
        if dtype is torch.float32:
            work = max(work, *(_PRODUCTS[name] for name in float32_products()))
        return cls(work, torch.finfo(dtype).eps / 2)

    @property
    def store(self) -> float:
        """Relative error of one result that is stored."""
        return LAMBDA / 3**0.5 * self.stored
