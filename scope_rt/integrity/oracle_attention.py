"""Positions, biases and softmax of one token, written out from their definitions.

Nothing here calls what streams call: `models.rope`, `attention` and `key_bias` are under test.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scope_contracts.arithmetic import LAMBDA
from scope_rt.integrity.tolerance import Array, Rounding, Tracked

ROPE_BASE = 10_000.0
EXP_ROUNDINGS = 80
"""Two exponentials, each right to 20 units in the last place: torch's least exact one."""


@lru_cache(maxsize=8)
def frequencies(head_dim: int) -> tuple[Array, NDArray[np.intp]]:
    """Radians by which every pair of channels turns a step, and its axis: frame, row or column.

    A third of the pairs, rounded down, follows rows and as many columns (Wan); pair i of d turns
    by base^(-i / d) (RoFormer, Su et al. 2021, section 3.2.2).
    """
    side = head_dim // 6
    counts = (head_dim // 2 - 2 * side, side, side)
    axes = np.repeat(np.arange(3), counts)
    rates = [ROPE_BASE ** (-index / count) for count in counts for index in range(count)]
    return np.asarray(rates), axes


def turned(x_NHD: Tracked, positions: Sequence[tuple[int, int, int]], store: float) -> Tracked:
    """Each token's pairs of channels turned by its frame, row and column."""
    rates, axes = frequencies(x_NHD.value.shape[-1])
    angles = np.asarray(positions, dtype=np.float64)[:, axes] * rates
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    even, odd = x_NHD.value[..., 0::2], x_NHD.value[..., 1::2]
    value, error = np.empty_like(x_NHD.value), np.empty_like(x_NHD.value)
    value[..., 0::2] = even * cos - odd * sin
    value[..., 1::2] = even * sin + odd * cos
    either = x_NHD.error[..., 0::2] + x_NHD.error[..., 1::2] + store * (abs(even) + abs(odd))
    error[..., 0::2] = error[..., 1::2] = either
    return Tracked(value, error)


def log_biases(
    frames_in_view: Sequence[int],
    *,
    first_current: int,
    log_bias: float,
    log_weights: Sequence[float],
) -> list[float]:
    """What is added to the scores of every frame slot: past frames but the oldest are biased."""
    oldest = min(frames_in_view)
    weights = log_weights or [0.0] * len(frames_in_view)
    return [
        weight + (log_bias if oldest != frame < first_current else 0.0)
        for frame, weight in zip(frames_in_view, weights, strict=True)
    ]


def attended(
    q_HD: Tensor, k_KHD: Tensor, v_KHD: Tensor, biases: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Softmax attention of one query over K keys `[H, D]`, and the largest key and value `[2]`.

    `biases` are of equal runs of keys. Products and sums are taken in float32 or wider, number by
    number and not as matrices: in float64 this would cost as much as the attention of all queries.
    """
    num_keys, _, dim = k_KHD.shape
    work = torch.promote_types(q_HD.dtype, torch.float32)
    q, k, v = q_HD.to(work) / math.sqrt(dim), k_KHD.to(work), v_KHD.to(work)
    scores_KH = (k * q).sum(-1).double()
    if any(biases):
        by_frame = torch.tensor(biases, dtype=torch.float64).to(q_HD.device)
        scores_KH += by_frame.repeat_interleave(num_keys // len(biases))[:, None]
    p = scores_KH.softmax(0).to(work)
    out = (v * p[..., None]).sum(0)
    largest = torch.stack((*k.aminmax(), *v.aminmax())).abs().view(2, 2).amax(1)
    return out, largest


def attention_bound(
    q_NHD: Array,
    out_NHD: Array,
    largest_N2: Array,
    *,
    keys: Sequence[tuple[int, float]],
    rounding: Rounding,
    is_cuda: bool,
) -> Array:
    """How far a kernel's attention may be off; `keys` are each record's number and largest bias.

    The bound is that of the project's attention tests: an exponent that is off by r moves its
    probability by r, in its run and at a merge of runs; sums over keys and the rounding of
    probabilities and results to the stored dtype come on top. A score is at most the sum of sizes
    in q times the largest key. `attended` rounds as much as a kernel.
    """
    num_keys, biases = np.asarray(keys, dtype=np.float64).T[:, :, None]
    largest_k, largest_v = largest_N2.T[:, :, None]
    sizes = np.abs(q_NHD).sum(-1) * (largest_k / math.sqrt(q_NHD.shape[-1]))
    r = rounding.work * ((LAMBDA + 6) * sizes + 6 * (np.log(num_keys) + biases) + EXP_ROUNDINGS)
    per_size = 2 * (3 * r + (LAMBDA * np.sqrt(num_keys) + 8) * rounding.work)
    if rounding.stored != rounding.work:
        per_size += 3 * rounding.stored
        if is_cuda:  # there the bias takes the dtype of q
            per_size += 2 * rounding.stored * biases
    bound: Array = per_size[..., None] * (largest_v[..., None] + np.abs(out_NHD))
    return bound


def text_attended(q_NHD: Tracked, k_LHD: Array, v_LHD: Array, rounding: Rounding) -> Tracked:
    """Attention over a text's keys of queries that are known up to their errors."""
    length, _, dim = k_LHD.shape
    k, v = k_LHD.transpose(1, 2, 0) / math.sqrt(dim), v_LHD.transpose(1, 0, 2)
    q, q_off = (x.transpose(1, 0, 2) for x in q_NHD)  # [H, N, D]
    scores = q @ k
    r = np.sqrt((q_off * q_off) @ (k * k)) + rounding.stored * 4 * np.abs(scores)
    r += rounding.work * (LAMBDA * np.sqrt((q * q) @ (k * k) * dim) + EXP_ROUNDINGS)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    out, sizes = p @ v, np.abs(v)
    moved = p * np.expm1(np.minimum(r, 30.0))
    error = moved @ sizes + moved.sum(-1, keepdims=True) * np.abs(out)
    per_size = (LAMBDA * math.sqrt(length) + 8) * rounding.work + 3 * rounding.store
    error += per_size * (p @ sizes)
    num = q.shape[1]
    value, off = (x.transpose(1, 0, 2).reshape(num, -1) for x in (out, error))
    return Tracked(value, off)
