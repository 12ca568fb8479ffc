"""What was loaded is remembered as sums, and every product is held against them.

Freivalds (1977) and Huang and Abraham (1984): for signs r, `(r W) x` must be `r (W x)`. `r W` is
taken once, in float64, when the weights are loaded, so a weight that changed later shows in the
products with it, whatever any digest says. Biases are kept as they were. Bounds are of whole
tokens: what rounding errors of all numbers add to a sum follows from the Euclidean length of the
token's numbers, by Cauchy and Schwarz.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from scope_contracts.arithmetic import LAMBDA
from scope_rt.integrity.tolerance import SHARED, Array, Rounding

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


def length(x: Tensor) -> Tensor:
    """Euclidean norm of every row of `[..., N, C]`: `[..., 1, N]`."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return norm[..., None, :]


def walk(root_terms: float | Tensor, of_sum: Tensor, of_terms: Tensor, work: float) -> Tensor:
    """Rounding error of a sum of terms, whose number's root is given: its own size, and the length
    of its terms."""
    sizes = (of_sum.abs() * (LAMBDA * work / math.sqrt(3))).add_(
        of_terms, alpha=LAMBDA * work / math.sqrt(6)
    )
    return sizes.mul_(root_terms)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductBound:
    """How far sums of the products of linear layers may be off; P of them of each of L blocks."""

    root_rows_P11: Tensor
    """Root of the number of products."""
    root_columns_P11: Tensor
    bias_sums_LPK1: Tensor
    largest_LPK1: Tensor
    """Of the weights' sums."""
    terms_LPK1: Tensor
    """That, and the length of the longest column."""

    def at(self, layers: Tensor) -> "ProductBound":
        """Of some of the layers, in that order."""
        return ProductBound(
            root_rows_P11=self.root_rows_P11,
            root_columns_P11=self.root_columns_P11,
            bias_sums_LPK1=self.bias_sums_LPK1[layers],
            largest_LPK1=self.largest_LPK1[layers],
            terms_LPK1=self.terms_LPK1[layers],
        )

    @classmethod
    def together(cls, bounds: Sequence["ProductBound"]) -> "ProductBound":
        """Of several linear layers of the same blocks."""
        first = torch.cat([each.root_rows_P11 for each in bounds])
        return ProductBound(
            root_rows_P11=first,
            root_columns_P11=torch.cat([each.root_columns_P11 for each in bounds]),
            bias_sums_LPK1=torch.cat([each.bias_sums_LPK1 for each in bounds], dim=1),
            largest_LPK1=torch.cat([each.largest_LPK1 for each in bounds], dim=1),
            terms_LPK1=torch.cat([each.terms_LPK1 for each in bounds], dim=1),
        )

    def of(self, *, got: Tensor, y: Tensor, x: Tensor, rounding: Rounding) -> Tensor:
        """For sums `[L, P, K, N]`.

        `y` and `x` are lengths `[L, P, 1, N]` of a token's products and of what was multiplied.
        Both the kernel's sums and those taken here are rounded.
        """
        work, size = rounding.work, got.abs()
        both = size + y
        bound = walk(self.root_columns_P11, both, self.terms_LPK1 * x, work)
        bound += walk(self.root_rows_P11, size, y, work)
        return bound.add_(both, alpha=SHARED * work + 2 * rounding.store)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSums:
    """A linear layer of each of L blocks; K sums of the numbers that it gives."""

    signs_KR: Tensor
    sums_LKC: Tensor
    """Of the weights; `sums @ x` must be `signs @ (W x)`."""
    bias_LR: Tensor
    bound: ProductBound

    @classmethod
    def of(
        cls, linears: Sequence[nn.Module], *, has_bias: bool = True, dtype: torch.dtype
    ) -> "LinearSums":
        """`has_bias` tells whether the products that are checked have the bias in them."""
        found = [each for each in linears if isinstance(each, nn.Linear)]
        assert len(found) == len(linears)
        (rows, columns), device = found[0].weight.shape, found[0].weight.device
        signs_KR = torch.from_numpy(signs(rows, NUM_SUMS)).to(device).T.contiguous()
        weights = [linear.weight.detach().double() for linear in found]
        none = torch.zeros(rows, device=device, dtype=torch.float64)
        biases = [none if each.bias is None else each.bias.detach().double() for each in found]
        sums_LKC, bias_LR = torch.stack([signs_KR @ w for w in weights]), torch.stack(biases)
        longest = [torch.linalg.vector_norm(weight, dim=0).amax() for weight in weights]
        largest_LPK1 = sums_LKC.abs().amax(-1)[:, None, :, None]
        terms_LPK1 = torch.stack(longest).view(-1, 1, 1, 1) + largest_LPK1
        bias_sums_LK = bias_LR @ signs_KR.T * has_bias
        return cls(
            signs_KR=signs_KR.to(dtype),
            sums_LKC=sums_LKC.to(dtype),
            bias_LR=bias_LR.to(dtype),
            bound=ProductBound(
                root_rows_P11=_root(rows, bias_LR).to(dtype),
                root_columns_P11=_root(columns, bias_LR).to(dtype),
                bias_sums_LPK1=bias_sums_LK[:, None, :, None].to(dtype),
                largest_LPK1=largest_LPK1.to(dtype),
                terms_LPK1=terms_LPK1.to(dtype),
            ),
        )


def _root(number: int, example: Tensor) -> Tensor:
    return example.new_full((1, 1, 1), math.sqrt(number))
