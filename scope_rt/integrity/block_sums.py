"""The linear layers of all blocks as they were loaded, as sums that whole tensors are held against.

`linear_sums` says why. Bounds here are of whole tokens: what rounding errors of all numbers add to
a sum follows from the Euclidean length of the token's numbers, by Cauchy and Schwarz.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from scope_contracts.arithmetic import LAMBDA
from scope_rt.integrity.linear_sums import NUM_SUMS, signs
from scope_rt.integrity.tolerance import SHARED, Rounding


def walk(num_terms: int, of_sum: Tensor, of_terms: Tensor, work: float) -> Tensor:
    """Rounding error of a sum of so many terms: its own size, and the length of its terms."""
    root = LAMBDA * work * math.sqrt(num_terms)
    return of_sum.abs() * (root / math.sqrt(3)) + of_terms * (root / math.sqrt(6))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductSums:
    """One linear layer of each of L blocks; K sums of `rows` numbers."""

    rows: int
    columns: int
    signs_RK: Tensor
    sums_LCK: Tensor
    """Of the weights; `x @ sums` must be `(W x) @ signs`."""
    bias_LR: Tensor
    bias_sums_LK: Tensor
    largest_LK: Tensor
    """Of the sums."""
    column_L: Tensor
    """Length of the longest column."""

    @classmethod
    def of(
        cls, linears: Sequence[nn.Module], *, has_bias: bool, dtype: torch.dtype
    ) -> "ProductSums":
        """`has_bias` tells whether the products that are checked have the bias in them."""
        found = [each for each in linears if isinstance(each, nn.Linear)]
        assert len(found) == len(linears)
        (rows, columns), device = found[0].weight.shape, found[0].weight.device
        signs_RK = torch.from_numpy(signs(rows, NUM_SUMS)).to(device)
        weights = [linear.weight.detach().double() for linear in found]
        none = torch.zeros(rows, device=device, dtype=torch.float64)
        biases = [none if each.bias is None else each.bias.detach().double() for each in found]
        sums_LCK, bias_LR = torch.stack([w.T @ signs_RK for w in weights]), torch.stack(biases)
        longest = [torch.linalg.vector_norm(weight, dim=0).amax() for weight in weights]
        return cls(
            rows=rows,
            columns=columns,
            signs_RK=signs_RK.to(dtype),
            sums_LCK=sums_LCK.to(dtype),
            bias_LR=bias_LR.to(dtype),
            bias_sums_LK=(bias_LR @ signs_RK * has_bias).to(dtype),
            largest_LK=sums_LCK.abs().amax(1).to(dtype),
            column_L=torch.stack(longest).to(dtype),
        )

    def bound(
        self,
        layers: Tensor,
        *,
        got: Tensor,
        y: Tensor,
        x: Tensor,
        x_error: Tensor | None,
        rounding: Rounding,
    ) -> Tensor:
        """How far sums `[R, N, K]` of products may be from those of the weights.

        `y`, `x` and `x_error` are lengths `[R, N or 1, 1]` of a token's products, of what was
        multiplied and of its error. Both the kernel's sums and those taken here are rounded.
        """
        work, largest = rounding.work, self.largest_LK[layers][:, None]
        terms = self.column_L[layers][:, None, None] + largest
        bound = walk(self.columns, got.abs() + y, terms * x, work) + walk(self.rows, got, y, work)
        bound += (SHARED * work + 2 * rounding.store) * (y + got.abs())
        if x_error is not None:
            bound += largest * x_error
        return bound
