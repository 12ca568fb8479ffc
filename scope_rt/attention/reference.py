"""Dense attention written out in float64: what every other backend is tested against."""

from einops import einsum
from torch import Tensor


class DenseReference:
    """Scores, softmax and weighted sum as in Vaswani et al. (2017), nothing fused."""

    name = "reference"

    def attend(
        self, q_BTHD: Tensor, k_BKHD: Tensor, v_BKHD: Tensor, log_bias_K: Tensor | None
    ) -> Tensor:
        q, k, v = q_BTHD.double(), k_BKHD.double(), v_BKHD.double()
        scores = einsum(q, k, "b t h d, b k h d -> b h t k") / q.shape[-1] ** 0.5
        if log_bias_K is not None:
            scores = scores + log_bias_K.double()
        out = einsum(scores.softmax(-1), v, "b h t k, b k h d -> b t h d")
        result: Tensor = out.to(q_BTHD.dtype)
        return result
