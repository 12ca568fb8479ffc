"""torch's scaled_dot_product_attention, held to one kernel family with and without a mask."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from scope_rt.attention.key_bias import KeyBias

_CUDA_FAMILIES = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""On CUDA torch's flash kernel takes no mask, so left alone torch would choose by the bias."""


class Sdpa:
    """The bias travels as an additive mask that is broadcast over batch, heads and queries."""

    name = "sdpa"

    def attend(
        self, q_BTHD: Tensor, k_BKHD: Tensor, v_BKHD: Tensor, bias: KeyBias | None
    ) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BKHD, v_BKHD))
        mask = None if bias is None else bias.vector(q.device, _mask_dtype(q))[None, None, None]
        with sdpa_kernel(_CUDA_FAMILIES) if q.is_cuda else nullcontext():
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def _mask_dtype(q: Tensor) -> torch.dtype:
    """CUDA's kernels want the dtype of q, which rounds the bias there; the CPU's take it exact."""
    return q.dtype if q.is_cuda else torch.promote_types(q.dtype, torch.float32)
