"""Dense attention written out in float64: what every other backend is tested against."""

import torch
from einops import einsum
from torch import Tensor

from scope_rt.attention.key_bias import KeyBias


class DenseReference:
    """Scores, softmax and weighted sum as in Vaswani et al. (2017), nothing fused."""

    name = "reference"

    def attend(
        self, q_BTHD: Tensor, k_BKHD: Tensor, v_BKHD: Tensor, bias: KeyBias | None
    ) -> Tensor:
        q, k, v = q_BTHD.double(), k_BKHD.double(), v_BKHD.double()
        scores = einsum(q, k, "b t h d, b k h d -> b h t k") / q.shape[-1] ** 0.5
        if bias is not None:
            scores = scores + bias.vector(q.device, torch.float64)
        out = einsum(scores.softmax(-1), v, "b h t k, b k h d -> b t h d")
        result: Tensor = out.to(q_BTHD.dtype)
        return result
