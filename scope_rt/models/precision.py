"""What is computed in float32 whatever a model's dtype: latents, schedule, norms, modulation, RoPE.

Weights, and what matrices multiply, have the dtype that was asked for. A sum over thousands of
channels, a scale that every token is multiplied by, and what goes from step to step would carry
the rounding of bfloat16 into all that follows; beside the matrices they cost little.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def wide(x: Tensor) -> Tensor:
    """`x` in float32; itself where it has that precision or more."""
    return x if x.dtype is torch.float64 else x.float()


class Linear(nn.Linear):
    """Draws no first weights on `meta`, where they would cost more than all else of a model."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class WideLinear(Linear):
    """Computes in float32 with weights of any dtype, and gives float32.

    Its weights are widened by one of `num_pieces` at a time, not to hold all of them twice.
    """

    num_pieces = 6

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dtype in (torch.float32, torch.float64):
            return super().forward(x)
        pieces = zip(
            self.weight.chunk(self.num_pieces), self.bias.chunk(self.num_pieces), strict=True
        )
        return torch.cat([F.linear(wide(x), wide(w), wide(b)) for w, b in pieces], dim=-1)


class WideLayerNorm(nn.LayerNorm):
    """Computes in float32; rounded once, to the dtype that came in."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = wide(self.weight), wide(self.bias)
        return F.layer_norm(wide(x), self.normalized_shape, weight, bias, self.eps).to(x.dtype)
