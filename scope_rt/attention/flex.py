"""torch's flex_attention with the bias as a score modification.

Fused by the compiler on CUDA; elsewhere the same graph runs unfused: right, and slow.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from scope_rt.attention.key_bias import KeyBias


class Flex:
    """One graph for every bias: no bias is a bias of zeros, not another graph."""

    name = "flex"

    def __init__(self) -> None:
        self._fused: Callable[..., Tensor] = torch.compile(flex_attention, fullgraph=True)
        self._unfused: Callable[..., Tensor] = torch.compile(
            flex_attention, fullgraph=True, backend="eager"
        )

    def attend(
        self, q_BTHD: Tensor, k_BKHD: Tensor, v_BKHD: Tensor, bias: KeyBias | None
    ) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BKHD, v_BKHD))
        dtype = torch.promote_types(q.dtype, torch.float32)
        if bias is None:
            log_bias_K = torch.zeros(k.shape[2], device=q.device, dtype=dtype)
        else:
            log_bias_K = bias.vector(q.device, dtype)

        def add_bias(score: Tensor, b: Tensor, h: Tensor, t: Tensor, key: Tensor) -> Tensor:
            return score + log_bias_K[key]

        attend = self._fused if q.is_cuda else self._unfused
        return attend(q, k, v, score_mod=add_bias).transpose(1, 2)
