"""Positions, biases and softmax of all tokens, written out from their definitions.

Nothing here calls what streams call: `models.rope`, `attention` and `key_bias` are under test.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scope_contracts.arithmetic import LAMBDA
from scope_rt.integrity.audit_plan import Audit, CallPlan
from scope_rt.integrity.tolerance import Array, Rounding
from scope_rt.integrity.workspace import WORKSPACE_BYTES, Workspace
from scope_rt.kv_cache.frame_cache import WriteWindow

ROPE_BASE = 10_000.0
EXP_ROUNDINGS = 80
"""Two exponentials, each right to 20 units in the last place: torch's least exact one."""
Rows = tuple[Tensor, Tensor]
"""Keys and values, or what is known of them."""


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


def angles(positions: Sequence[tuple[int, int, int]], head_dim: int) -> Array:
    """Radians by which every pair of channels is turned, of each token's frame, row and column:
    `[N, D / 2]`."""
    rates, axes = frequencies(head_dim)
    radians: Array = np.asarray(positions, dtype=np.float64)[:, axes] * rates
    return radians


def turned(x_HD: Array, positions: Sequence[tuple[int, int, int]]) -> Array:
    """Pairs of channels turned by each token's frame, row and column: `[N, H, D]`."""
    radians = angles(positions, x_HD.shape[-1])
    cos, sin = np.cos(radians)[:, None], np.sin(radians)[:, None]
    even, odd = x_HD[..., 0::2], x_HD[..., 1::2]
    out = np.empty((len(positions), *x_HD.shape))
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = even * sin + odd * cos
    return out


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


def key_biases(plan: CallPlan, window: WriteWindow, tokens: Sequence[int]) -> Tensor:
    """What is added to the scores of all keys in view, `[N or 1, K]`.

    A recompute hides later blocks from `tokens`; its keys lie in the order of their frames.
    """
    by_frame = log_biases(
        window.frames_in_view,
        first_current=plan.first_frame,
        log_bias=plan.log_bias,
        log_weights=window.log_weights,
    )
    size = plan.rows * plan.columns
    biases = torch.tensor([by_frame], dtype=torch.float64).repeat_interleave(size, dim=1)
    if not plan.block_frames:
        return biases
    block_of = torch.arange(plan.num_tokens) // (plan.block_frames * size)
    is_later = block_of > block_of[list(tokens)][:, None]
    return biases.expand(is_later.shape).masked_fill(is_later, -torch.inf)


class Attended(NamedTuple):
    """What attention must give of one call's queries, from the keys and values it was shown."""

    moments_BHSN: Tensor
    """Sums over each head's channels, then of the values' squares: 2 K."""
    rows_BKHS: Rows
    """Sums over the channels of all keys and values: what they are told by."""
    longest_BH: Rows
    """Lengths of keys and values; of the first call's that was shown them, as past rows stay."""
    largest_bias: Tensor
    audit: Audit
    window: WriteWindow
    score_error_BH1N: Tensor | None = None
    """Of queries and keys that attention turned; None where they came turned."""


def attended(
    q_BNHD: Tensor,
    k_BKHD: Tensor,
    value_sums_BKHS: Tensor,
    biases_NK: Tensor,
    workspace: Workspace,
) -> Tensor:
    """Softmax attention: `moments_BHSN` of `Attended`.

    Sums are taken of values, not of what comes out: half of the products.
    """
    k = k_BKHD
    batch, queries, heads, dim = q_BNHD.shape
    values = value_sums_BKHS.permute(0, 2, 3, 1).flatten(0, 1)
    values = torch.cat((values, values * values), dim=1)
    q = q_BNHD.transpose(1, 2).flatten(0, 1)
    kT = k.permute(0, 2, 3, 1).flatten(0, 1)
    piece = max(1, WORKSPACE_BYTES // (batch * heads * k.shape[1] * q.element_size()))
    parts = []
    for start in range(0, queries, piece):
        part = q[:, start : start + piece]
        bias = biases_NK if len(biases_NK) == 1 else biases_NK[start : start + piece]
        shape = (*part.shape[:2], k.shape[1])
        scores, weights = workspace.like(shape, q, 0), workspace.like(shape, q, 1)
        torch.baddbmm(bias, part, kT, alpha=dim**-0.5, out=scores)
        parts.append(torch.bmm(values, torch.softmax(scores, -1, out=weights).mT))
    moments = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    return moments.view(batch, heads, -1, queries)


def of_batch(rows_BKHD: Rows, batch: int | None, dtype: torch.dtype) -> Rows:
    """Keys and values of one batch row, or of all, as they are worked with."""
    k, v = rows_BKHD
    if batch is not None:
        k, v = k[batch : batch + 1], v[batch : batch + 1]
    return k.to(dtype), v.to(dtype)


def row_sums(rows_BKHD: Rows, signs_DS: Tensor) -> Rows:
    """Sums over the channels of every key and value, `[B, K, H, S]`."""
    k, v = rows_BKHD
    return k @ signs_DS, v @ signs_DS


def longest(x_BTHD: Tensor) -> Tensor:
    """Of each head's vectors, `[..., B, H]`."""
    lengths: Tensor = torch.linalg.vector_norm(x_BTHD, dim=-1).amax(-2)
    return lengths


def largest_of(x: Tensor) -> Tensor:
    """The length of the longest vector."""
    lengths: Tensor = torch.linalg.vector_norm(x, dim=-1).amax()
    return lengths


def largest(biases: Tensor) -> Tensor:
    """What scores are moved by at most."""
    return biases.masked_fill(biases.isinf(), 0.0).abs().amax()


def attention_sums(
    made: Sequence[Attended],
    q_lengths_RBHN: Tensor,
    new_RBH: Rows,
    dim: int,
    *,
    rounding: Rounding,
    is_half: bool,
) -> tuple[Tensor, Tensor]:
    """Sums of each head's channels and how far a kernel's may be off, `[R, H * K, B * N]`.

    `new_RBH` are the longest of the keys and values that each call added. A score that is off by r
    moves an output by at most r standard deviations of its values, and both the kernel's scores and
    these are rounded.
    """
    work, num_keys = rounding.work, made[0].rows_BKHS[0].shape[1]
    longest_k, longest_v = (
        torch.maximum(torch.stack([each.longest_BH[index] for each in made]), new)[..., None, None]
        for index, new in enumerate(new_RBH)
    )
    bias = torch.stack([each.largest_bias for each in made]).view(-1, 1, 1, 1, 1)
    mean, squares = torch.stack([each.moments_BHSN for each in made]).chunk(2, dim=-2)
    # A difference of squares, and rounded as such.
    spread = (squares - mean * mean).clamp_min_(0).sqrt_().add_(longest_v * math.sqrt(dim * work))
    r = (2 * work * (LAMBDA + 6) / math.sqrt(dim)) * q_lengths_RBHN[..., None, :] * longest_k
    r += (2 * work) * (6 * (math.log(num_keys) + bias) + EXP_ROUNDINGS)
    turning = [each.score_error_BH1N for each in made if each.score_error_BH1N is not None]
    if turning:
        r += torch.stack(turning)
    per_size = work * (2 * LAMBDA * math.sqrt(num_keys / 3) + LAMBDA * math.sqrt(dim) + 16)
    if is_half:
        per_size += 2 * rounding.store
        if r.is_cuda:  # there the bias takes the dtype of q
            r = r + 2 * rounding.stored * bias
    bound = (r.expm1() * r.exp() * spread).add_(longest_v, alpha=per_size)
    sums, bounds = (x.permute(0, 2, 3, 1, 4).flatten(3).flatten(1, 2) for x in (mean, bound))
    return sums, bounds
