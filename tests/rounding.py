"""How far rounding alone may take a result; the bounds of all numeric tests, not a test itself.

A bound follows from the arithmetic, never from what the kernels of one processor gave: sums may be
taken in any order, with or without fused multiply-adds. The model is fl(a op b) = (a op b)(1 + d)
with |d| <= u, and n such factors differ from 1 by at most gamma_n = n u / (1 - n u): N. J. Higham,
"Accuracy and Stability of Numerical Algorithms", 2nd edition (SIAM 2002), section 2.2, lemma 3.1.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

# Contracts: what the project promises of whole models, not bounds of rounding.
FP64_CONTRACT = 1e-10
"""Two ways to compute one model in float64."""
DIFFUSERS_CONTRACT = 1e-5
"""One forward in float32 against the model of diffusers."""
PARITY_CONTRACT = 2e-5
"""A rollout in float32 against the recording of the model's own authors."""
TP_CONTRACT = 1e-4
"""A stream in float32 at one TP degree against another."""

EXP_ULPS = 20
"""The least exact exponential that an attention kernel of torch takes: `exp_u20` of `at::vec`."""


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of one rounding to the nearest number of `dtype`."""
    return torch.finfo(dtype).eps / 2


def gamma(num_roundings: int, dtype: torch.dtype) -> float:
    """Largest relative error of `num_roundings` operations in a row (Higham, lemma 3.1)."""
    nu = num_roundings * unit_roundoff(dtype)
    assert nu < 0.5, f"{num_roundings} roundings in {dtype} leave nothing to compare"
    return nu / (1 - nu)


def dot_bound(x: Tensor, y: Tensor) -> Tensor:
    """Error of `x @ y` in their dtype, `gamma_n |x| @ |y|` (Higham, section 3.5)."""
    return gamma(x.shape[-1], x.dtype) * (x.double().abs() @ y.double().abs())


def any_order_bound(one_order: Tensor, exact: Tensor, *, num_terms: int) -> float:
    """How far two orders of the same sums may be apart, for what no bound is derived by hand.

    `one_order` is one of them and `exact` the same in float64. Errors of sums of `num_terms` terms
    come to about the square root of their bound (Higham, section 2.8), so that root makes a bound
    of a measured error; each of two orders may be off by it.
    """
    measured = float((one_order - exact).abs().max())
    assert 0 < measured < 1e-4 * float(exact.abs().max()), "this is no rounding error"
    return 2 * math.sqrt(num_terms) * measured


def is_rounded_to_half(got: Tensor, stored: Tensor) -> bool:
    """Whether `got` is `stored` to the nearest float16, subnormal numbers included."""
    limits = torch.finfo(torch.float16)
    rounding = unit_roundoff(torch.float16) * stored.abs().clamp_min(limits.smallest_normal)
    return bool(((got - stored).abs() <= rounding).all())


@contextmanager
def in_float64() -> Iterator[None]:
    """transformers takes norms, softmax, angles and routers in float32 whatever a model is in.

    In here they are in float64 too, so that what differs by more than 1e-10 is a mistake.
    """
    with (
        patch.object(torch, "float32", torch.float64),
        patch.object(torch, "float", torch.float64),
        patch.object(Tensor, "float", Tensor.double),
    ):
        yield


def attention_bound(
    q_BTHD: Tensor,
    k_BKHD: Tensor,
    v_BKHD: Tensor,
    log_bias_K: Tensor | None = None,
    *,
    scores_in: torch.dtype | None = None,
) -> Tensor:
    """Error of softmax(q k / sqrt(D) + log_bias) v against the float64 reference, `[B, T, H, D]`.

    It holds for one softmax over all keys, and for softmaxes over runs of keys with one bias each
    that are merged by their log-sum-exps (LSE). To first order, with p the exact probabilities:

    - An exponent that is off by r turns p_j into p_j (1 + r). The exponent of key j is a dot
      product of D terms, a scale and a bias: gamma_{D+2} |q| |k| / sqrt(D), and at most six
      roundings of numbers no larger than the LSE and the bias: adding the bias, subtracting the
      maximum, and the same at a merge. The exponential is taken twice, once for the merge.
    - A probability that is off by p_j r_j changes the numerator by p_j r_j v_j and the denominator
      by p_j r_j; at a merge it does so inside of its run and in the weight of its run, which makes
      p_j r_j (3 |v_j| + |out|).
    - Sums over K keys, of the numerator and the denominator: gamma_{2K+8} p_j |v_j|.

    Half precision multiplies and adds in float32. The probabilities are right to 1 ulp of its own
    dtype, and it rounds to that dtype what a run gives and the result; and to `scores_in`, where
    that is given, the scores and the bias.
    """
    dtype = q_BTHD.dtype
    half = dtype in (torch.float16, torch.bfloat16)
    work = torch.float32 if half else dtype
    q, k, v = (x.double() for x in (q_BTHD, k_BKHD, v_BKHD))
    num_keys, dim = k.shape[1], k.shape[-1]
    bias_K = q.new_zeros(num_keys) if log_bias_K is None else log_bias_K.to(q)
    scores = _scores(q, k)
    p = (scores + bias_K).softmax(-1)
    lse = scores.abs().amax(-1, keepdim=True) + math.log(num_keys)
    exponent = (
        gamma(dim + 2, work) * _scores(q.abs(), k.abs()).amax(-1, keepdim=True)
        + gamma(6, work) * (lse + bias_K.abs())
        + 2 * EXP_ULPS * torch.finfo(work).eps
    )
    weighted, out = _mean(p, v.abs()), _mean(p, v).abs()

    def moved(p_off: Tensor, times: int) -> Tensor:
        return times * _mean(p_off, v.abs()) + p_off.sum(-1).transpose(1, 2)[..., None] * out

    bound = moved(p * exponent, 3) + gamma(2 * num_keys + 8, work) * weighted
    if half:
        bound += 3 * unit_roundoff(dtype) * (weighted + out)
    if scores_in is not None:
        bound += moved(p * unit_roundoff(scores_in) * (scores.abs() + bias_K.abs()), 1)
    if dtype is torch.float64:
        bound *= 2  # the reference rounds as much
    return bound


def _scores(q_BTHD: Tensor, k_BKHD: Tensor) -> Tensor:
    return torch.einsum("bthd,bkhd->bhtk", q_BTHD, k_BKHD) / math.sqrt(k_BKHD.shape[-1])


def _mean(p_BHTK: Tensor, v_BKHD: Tensor) -> Tensor:
    return torch.einsum("bhtk,bkhd->bthd", p_BHTK, v_BKHD)
