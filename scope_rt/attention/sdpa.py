"""torch's scaled_dot_product_attention: the default where no flash-attn is built."""

import torch.nn.functional as F
from torch import Tensor


class Sdpa:
    """The bias travels as an additive mask that is broadcast over batch, heads and queries."""

    name = "sdpa"

    def attend(
        self, q_BTHD: Tensor, k_BKHD: Tensor, v_BKHD: Tensor, log_bias_K: Tensor | None
    ) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BKHD, v_BKHD))
        mask = None if log_bias_K is None else log_bias_K.to(q.dtype)[None, None, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
