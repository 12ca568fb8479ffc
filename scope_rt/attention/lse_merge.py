"""A bias needs no mask: attend run by run, and merge by log-sum-exp.

A constant added to the scores of a set of keys changes nothing inside that set: it is added to the
set's log-sum-exp (LSE), which is its weight against the others. So the plain kernel serves every
bias. The identity is the one of FlashAttention (Dao et al., 2022, section 3.1).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from scope_contracts.errors import UserInputError, mismatch
from scope_rt.attention.key_bias import KeyBias

LseKernel = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Attends `q_BTHD, k_BKHD, v_BKHD` and returns `out_BTHD` and the scores' `lse_BHT`."""


class LseMerge:
    """Run by run with the kernels that come with torch; one kernel for a device and dtype."""

    name = "lse_merge"

    def attend(
        self, q_BTHD: Tensor, k_BKHD: Tensor, v_BKHD: Tensor, bias: KeyBias | None
    ) -> Tensor:
        return attend_by_runs(_kernel_for(q_BTHD), q_BTHD, k_BKHD, v_BKHD, bias)


def attend_by_runs(
    kernel: LseKernel, q_BTHD: Tensor, k_BKHD: Tensor, v_BKHD: Tensor, bias: KeyBias | None
) -> Tensor:
    """Attention over all keys, from one call of `kernel` for every run of `bias`.

    The runs cover the keys exactly: `split` refuses any other count.
    """
    if bias is None:
        return kernel(q_BTHD, k_BKHD, v_BKHD)[0]
    sizes = [run.num_tokens for run in bias.runs]
    pieces = zip(k_BKHD.split(sizes, 1), v_BKHD.split(sizes, 1), strict=True)
    outs, lses = zip(*(kernel(q_BTHD, k, v) for k, v in pieces), strict=True)
    # What all runs share cancels; left in, a tiny bias would cost the LSE its low digits.
    largest = max(run.log_bias for run in bias.runs)
    biased = [lse + (run.log_bias - largest) for run, lse in zip(bias.runs, lses, strict=True)]
    weights_BTH1 = torch.stack(biased).softmax(0).transpose(2, 3).unsqueeze(-1).unbind()
    merged: Tensor = weights_BTH1[0] * outs[0]
    for weight, out in zip(weights_BTH1[1:], outs[1:], strict=True):
        merged += weight * out
    return merged.to(q_BTHD.dtype)


def _kernel_for(q: Tensor) -> LseKernel:
    """The kernel follows from device and dtype alone, so that a bias cannot choose another.

    Raises:
        UserInputError: torch has no such kernel for them.
    """
    half = q.dtype in (torch.float16, torch.bfloat16)
    if q.device.type == "cpu":
        return _flash_cpu
    if q.is_cuda and (half or q.dtype is torch.float32):
        return _flash_cuda if half else _efficient_cuda
    raise UserInputError(
        mismatch(
            "attention_backend (SCOPE_KV_BIAS_BACKEND) lse_merge",
            got=f"{q.dtype} on {q.device.type}",
            want="any dtype on cpu, or float16, bfloat16 or float32 on cuda",
            fix="choose sdpa",
        )
    )


def _flash_cpu(q_BTHD: Tensor, k_BKHD: Tensor, v_BKHD: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = _heads_first(q_BTHD, k_BKHD, v_BKHD)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    return out.transpose(1, 2), lse


def _flash_cuda(q_BTHD: Tensor, k_BKHD: Tensor, v_BKHD: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = _heads_first(q_BTHD, k_BKHD, v_BKHD)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)
    return out.transpose(1, 2), lse


def _efficient_cuda(q_BTHD: Tensor, k_BKHD: Tensor, v_BKHD: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = _heads_first(q_BTHD, k_BKHD, v_BKHD)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True)
    return out.transpose(1, 2), lse.narrow(2, 0, q.shape[2])  # its LSE is padded to 32s


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """`[B, H, T, D]` views with dense rows: the CPU kernel reads strided rows silently wrong."""
    dense = (x if x.stride(-1) == 1 else x.contiguous() for x in tensors)
    return [x.transpose(1, 2) for x in dense]
