"""What was loaded is remembered as sums, and every product is held against them.

Freivalds (1977) and Huang and Abraham (1984): for signs r, `(r W) x` must be `r (W x)`. `r W` is
taken once, when the weights are loaded, and kept in float64, so a weight that changed later shows
in the products with it, whatever any digest says. Biases are kept as they were.
"""

import math

import numpy as np
import torch
from torch import Tensor, nn

from scope_contracts.arithmetic import LAMBDA
from scope_rt.integrity.tolerance import (
    EXACT,
    SHARED,
    Array,
    Rounding,
    Tracked,
    fourth_norm,
    length,
)

NUM_SUMS = 2
"""Sums of a product with different signs: what is wrong in all rows may cancel out in one."""


def signs(*shape: int) -> Array:
    """Fixed pseudo-random weights between 1/2 and 1 with signs, the same in every process.

    All sizes are different, so that numbers which change places do not cancel out.
    """
    drawn = np.random.Generator(np.random.Philox(0)).uniform(-0.5, 0.5, shape)
    weights: Array = drawn + np.copysign(0.5, drawn)
    return weights


def to_array(x: Tensor) -> Array:
    """Float64 on the host."""
    array: Array = x.detach().double().cpu().numpy()
    return array


class LinearSums:
    """The sums of a linear layer as it was loaded; at most 40 bytes a row and a column."""

    def __init__(self, linear: nn.Linear, *, has_bias: bool = True) -> None:
        """`has_bias` tells whether the products that are checked have the bias in them."""
        weight = linear.weight.detach().double()
        rows, self._num_terms = weight.shape
        self._signs = signs(rows, NUM_SUMS)
        by_sign = torch.from_numpy(self._signs).to(weight.device)
        self._sums = to_array(weight.T @ by_sign)
        self._squares = self._sums**2
        self._rows_size = float((weight**4).sum(-1).sqrt().sum().sqrt())
        self.bias = np.zeros(rows) if linear.bias is None else to_array(linear.bias)
        self._bias_sums = self.bias @ self._signs * has_bias

    def sums(self, x: Tracked, y: Array, rounding: Rounding) -> tuple[Array, Array, Array]:
        """Got, want and bound of the sums of `y`, each `[N, NUM_SUMS]`; `y` should be `W x`.

        Errors of rows are independent, so they add up by the root of their squares; an error of
        `x` moves all rows at once.
        """
        got, want = y @ self._signs, x.value @ self._sums
        n, u = self._num_terms, rounding.work
        # sqrt(a + b) <= sqrt(a) + sqrt(b) splits the walk into what y and what the terms add.
        bound = LAMBDA * u * math.sqrt(n / 6) * self._rows_size * fourth_norm(x.value)
        per_size = (LAMBDA * math.sqrt(n / 3) + SHARED) * u + 2 * rounding.store
        bound = bound + per_size * length(y) + SHARED * u * np.abs(want)
        if x.error is not EXACT:
            bound = bound + np.sqrt((x.error * x.error) @ self._squares)
        return got, want + self._bias_sums, bound
