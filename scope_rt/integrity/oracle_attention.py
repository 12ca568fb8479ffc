"""Positions, biases and softmax of all tokens, written out from their definitions.

Nothing here calls what streams call: `models.rope`, `attention` and `key_bias` are under test.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scope_contracts.arithmetic import LAMBDA
from scope_rt.integrity.audit_plan import CallPlan
from scope_rt.integrity.tolerance import SQUARES_ROUNDOFF, Array, Rounding
from scope_rt.kv_cache.frame_cache import WriteWindow

ROPE_BASE = 10_000.0
EXP_ROUNDINGS = 80
"""Two exponentials, each right to 20 units in the last place: torch's least exact one."""
_WORKSPACE_BYTES = 64 << 20
"""Most scores held at a time; more queries are taken in pieces."""


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


def turned(x_HD: Array, positions: Sequence[tuple[int, int, int]]) -> Array:
    """Pairs of channels turned by each token's frame, row and column: `[N, H, D]`."""
    rates, axes = frequencies(x_HD.shape[-1])
    angles = np.asarray(positions, dtype=np.float64)[:, axes] * rates
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
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


class Workspace:
    """Memory that is used again and again: new memory is cold, which costs more than the work.

    As much as the largest use so far; each use ends before the next begins.
    """

    def __init__(self) -> None:
        self._numbers: Tensor | None = None

    def like(self, shape: tuple[int, ...], example: Tensor) -> Tensor:
        """Of that shape, and of the dtype and on the device of `example`; holds anything."""
        size = math.prod(shape)
        if self._numbers is None or self._numbers.numel() < size:
            self._numbers = example.new_empty(size)
        return self._numbers[:size].view(shape)


class Attended(NamedTuple):
    """What attention must give of one call's queries, from the keys and values it was shown."""

    moments_BHNS: Tensor
    """Sums over each head's channels, then of the values' squares: 2 K."""
    q_lengths_BHN1: Tensor
    longest_k_BH11: Tensor
    longest_v_BH11: Tensor
    largest_bias: Tensor
    num_keys: int
    rows_BKHS: tuple[Tensor, Tensor]
    """Sums over the channels of all keys and values: what they are told by."""


def attended(
    q_BNHD: Tensor,
    shown_BKHD: tuple[Tensor, Tensor],
    biases_NK: Tensor,
    signs_DS: Tensor,
    workspace: Workspace,
) -> Attended:
    """Softmax attention. Sums are taken of values, not of what comes out: half of the products."""
    k, v = shown_BKHD
    batch, queries, heads, dim = q_BNHD.shape
    key_sums, value_sums = row_sums(shown_BKHD, signs_DS)
    values = torch.cat(
        (value_sums, value_sums * value_sums, torch.ones_like(value_sums[..., :1])), dim=-1
    )
    values = values.transpose(1, 2).flatten(0, 1)
    q = q_BNHD.transpose(1, 2).flatten(0, 1)
    kT = k.permute(0, 2, 3, 1).flatten(0, 1)
    piece = max(1, _WORKSPACE_BYTES // (batch * heads * k.shape[1] * q.element_size()))
    parts = []
    for start in range(0, queries, piece):
        part = q[:, start : start + piece]
        bias = biases_NK if len(biases_NK) == 1 else biases_NK[start : start + piece]
        scores = workspace.like((*part.shape[:2], k.shape[1]), q)
        torch.baddbmm(bias, part, kT, alpha=dim**-0.5, out=scores)
        scores.sub_(scores.amax(-1, keepdim=True)).exp_()
        parts.append(torch.bmm(scores, values))
    sums = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    moments = sums[..., :-1] / sums[..., -1:]
    return Attended(
        moments_BHNS=moments.view(batch, heads, queries, -1),
        q_lengths_BHN1=torch.linalg.vector_norm(q_BNHD, dim=-1).transpose(1, 2)[..., None],
        longest_k_BH11=_longest(k),
        longest_v_BH11=_longest(v),
        largest_bias=_largest(biases_NK),
        num_keys=k.shape[1],
        rows_BKHS=(key_sums, value_sums),
    )


def of_batch(
    rows_BKHD: tuple[Tensor, Tensor], batch: int | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values of one batch row, or of all, as they are worked with."""
    at = slice(None) if batch is None else slice(batch, batch + 1)
    k, v = (rows[at].to(dtype) for rows in rows_BKHD)
    return k, v


def row_sums(rows_BKHD: tuple[Tensor, Tensor], signs_DS: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over the channels of every key and value, `[B, K, H, S]`."""
    k, v = rows_BKHD
    return k @ signs_DS, v @ signs_DS


def _longest(x_BKHD: Tensor) -> Tensor:
    longest: Tensor = torch.linalg.vector_norm(x_BKHD, dim=-1).amax(1)
    return longest[..., None, None]


def _largest(biases: Tensor) -> Tensor:
    return biases.masked_fill(biases.isinf(), 0.0).abs().amax()


def attention_sums(
    made: Sequence[Attended], dim: int, *, rounding: Rounding, is_half: bool
) -> tuple[Tensor, Tensor]:
    """Sums of each head's channels and how far a kernel's may be off, `[R, B * N, H * K]`.

    A score that is off by r moves an output by at most r standard deviations of its values, and
    both the kernel's scores and these are rounded.
    """
    moments, q, longest_k, longest_v, bias = (
        torch.stack(list(each)) for each in list(zip(*made, strict=True))[:5]
    )
    work, num_keys = rounding.work, made[0].num_keys
    mean, squares = moments.chunk(2, dim=-1)
    # A difference of squares, and rounded as such.
    spread = (squares - mean * mean).clamp_min_(0).sqrt_() + longest_v * math.sqrt(dim * work)
    sizes = q * longest_k / math.sqrt(dim)
    bias = bias.view(-1, 1, 1, 1, 1)
    r = 2 * work * ((LAMBDA + 6) * sizes + 6 * (math.log(num_keys) + bias) + EXP_ROUNDINGS)
    per_size = work * (2 * LAMBDA * math.sqrt(num_keys / 3) + LAMBDA * math.sqrt(dim) + 16)
    if is_half:
        per_size += 2 * rounding.store
        if q.is_cuda:  # there the bias takes the dtype of q
            r = r + 2 * rounding.stored * bias
    bound = r.expm1() * r.exp() * spread + per_size * longest_v
    sums, bounds = (x.transpose(2, 3).flatten(3).flatten(1, 2) for x in (mean, bound))
    return sums, bounds


def text_attended(
    scores_RBHNL: Tensor,
    lengths_RBHN1: Tensor,
    text: Mapping[str, Tensor],
    *,
    rounding: Rounding,
) -> tuple[Tensor, Tensor, float]:
    """What attention over a text makes of the next linear layer's sums, `[R, B * N, K]`.

    `text` are fields of `TextWeights`; lengths are those of queries. Those were stored on the way,
    so each number is off by a few roundings. Comes with a bound, and with how far off a token is
    beside that, relative to the longest values.
    """
    values, work = text["values_BHLK"], rounding.work
    num_keys = values.shape[-2]
    mean, squares = (scores_RBHNL.softmax(-1) @ values).chunk(2, dim=-1)
    largest_sum = values[..., : mean.shape[-1]].abs().amax(-2, keepdim=True)
    spread = (squares - mean * mean).clamp_min_(0).sqrt_() + largest_sum * math.sqrt(8 * work)
    sizes = lengths_RBHN1 * text["longest_BH11"]
    r = 2 * work * ((LAMBDA + 6) * sizes + 6 * math.log(num_keys) + EXP_ROUNDINGS)
    stored = 4 * rounding.store + 16 * SQUARES_ROUNDOFF
    r += stored * (lengths_RBHN1 * text["widest_BH11"] + scores_RBHNL.abs().amax(-1, keepdim=True))
    bound = (r.expm1() * r.exp() * spread).sum(2)
    error = 2 * (LAMBDA * math.sqrt(num_keys / 3) + 8) * work + 3 * rounding.store
    return mean.sum(2).flatten(1, 2), bound.flatten(1, 2), error
