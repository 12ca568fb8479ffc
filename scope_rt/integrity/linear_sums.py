"""What was loaded is remembered as sums, and every product is held against them.

Freivalds (1977) and Huang and Abraham (1984): for signs r, `(r W) x` must be `r (W x)`. `r W` is
taken once, when the weights are loaded, and kept in float64, so a weight that changed later shows
in the first product with it, whatever any digest says. Biases are kept as they were.
"""

import math

import numpy as np
import torch
from torch import Tensor, nn

from scope_contracts.arithmetic import LAMBDA
from scope_rt.integrity.tolerance import SHARED, Array, Rounding, Tracked, fourth_norm

_DOUBLE_ROUNDOFF = 2.0**-53


def signs(count: int, seed: int = 0) -> Array:
    """As many fixed pseudo-random signs, the same in every process."""
    return np.random.Generator(np.random.Philox(seed)).choice((-1.0, 1.0), count)


def to_array(x: Tensor) -> Array:
    """Float64 on the host."""
    array: Array = x.detach().double().cpu().numpy()
    return array


class LinearSums:
    """The sums of one linear layer as it was loaded; 8 bytes a row and a column."""

    def __init__(self, linear: nn.Linear) -> None:
        self._linear = linear
        weight = linear.weight.detach().double()
        rows, columns = weight.shape
        self._signs = signs(rows)
        by_column = torch.from_numpy(self._signs).to(weight.device) @ weight
        self._sums = to_array(by_column)
        self._size = float(weight.norm())
        self._row_fourth = to_array((weight**4).sum(-1) ** 0.25)
        self._num_terms = columns
        self.bias = np.zeros(rows) if linear.bias is None else to_array(linear.bias)

    def product(self, x: Tracked, rounding: Rounding) -> tuple[Tracked, tuple[Array, Array, Array]]:
        """`W x` without the bias, from the raw weights; and got, want and bound of its sum."""
        weight = self._linear.weight.detach().double()
        columns = torch.from_numpy(np.ascontiguousarray(x.value.T)).to(weight.device)
        y: Array = (weight @ columns).cpu().numpy().T
        n, u = self._num_terms, rounding.work
        # sqrt(a + b) <= sqrt(a) + sqrt(b) splits the walk into what y and what the terms add.
        off = LAMBDA * u * math.sqrt(n / 6) * fourth_norm(x.value) + fourth_norm(x.error)
        per_size = (LAMBDA * math.sqrt(n / 3) + SHARED) * u + rounding.store
        error = self._row_fourth * off + per_size * np.abs(y)
        length = np.sqrt(np.einsum("nj,nj->n", x.value, x.value))[:, None]
        bound = 4 * LAMBDA * _DOUBLE_ROUNDOFF * self._size * length
        got, want = y @ self._signs, x.value @ self._sums
        return Tracked(y, error), (got[:, None], want[:, None], bound)
