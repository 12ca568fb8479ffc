"""Queries and keys turned by their frames' places among those in view, where these change.

Own angles and own products, from the definitions: `models.rope`, `TurnInWindow` and the code that
chooses places are under test. What a model stores is rounded as it rounds.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from scope_contracts.arithmetic import LAMBDA
from scope_rt.integrity.audit_plan import CallPlan
from scope_rt.integrity.oracle_attention import angles
from scope_rt.kv_cache.frame_cache import WriteWindow


class Turned(NamedTuple):
    """What scores are made of; each head's channels are ordered otherwise, alike in both."""

    q_BNHD: Tensor
    k_BKHD: Tensor
    score_error_BH1N: Tensor
    """How far scores may be off because a kernel turned queries and keys with its own roundings."""


class WindowTurn:
    """Of one call: `tokens` of a batch row ask for all keys in view, in the order of the slots."""

    def __init__(
        self,
        plan: CallPlan,
        window: WriteWindow,
        tokens: Sequence[int],
        *,
        like: Tensor,
        stored: torch.dtype,
    ) -> None:
        """Works in dtype and on device of `like` `[..., head_dim]`; `stored` is the model's.

        A call's own frames are the newest, one place after another, in view or not: the first of
        those that are made again may be in view no more.
        """
        place = {frame: number for number, frame in enumerate(sorted(window.frames_in_view))}
        last_frame = plan.first_frame + plan.num_frames - 1
        asked = [plan.position(token) for token in tokens]
        queries = [
            (place[last_frame] - (last_frame - frame), row, column) for frame, row, column in asked
        ]
        keys = [
            (place[frame], row, column)
            for frame in window.frames_in_view
            for row in range(plan.rows)
            for column in range(plan.columns)
        ]
        self._queries, self._keys = (_factors(each, like) for each in (queries, keys))
        self._stored, self._is_half = stored, stored.itemsize < like.dtype.itemsize

    def turned(self, q_BNHD: Tensor, k_BKHD: Tensor) -> Turned:
        """Waits for no device."""
        q = self._stored_of(_turned(q_BNHD, *self._queries))
        k = self._stored_of(_turned(k_BKHD, *self._keys))
        return Turned(q, k, self._score_error(q, k))

    def _stored_of(self, x: Tensor) -> Tensor:
        return x.to(self._stored).to(x.dtype) if self._is_half else x

    def _score_error(self, q: Tensor, k: Tensor) -> Tensor:
        """Of one product of a query and a key, for both were turned twice: here, and by a kernel.

        An angle's cosine and sine are rounded, two products and their sum: four roundings of a
        pair's length, in a row. Where the results are stored in fewer bits, both are mostly rounded
        to the same number; to its neighbour only where they lie that near to the middle, with a
        probability in proportion. So few numbers are off, by a whole step: a walk over all, and
        two of the largest.
        """
        work, stored = (torch.finfo(dtype).eps / 2 for dtype in (q.dtype, self._stored))
        by_length, by_largest = 16 * work, 0.0
        if self._is_half:
            by_length += 2 * LAMBDA * math.sqrt(16 * work * stored)
            by_largest = 2 * 2 * stored
        lengths = [torch.linalg.vector_norm(x, dim=-1) for x in (q, k)]
        error = by_length * _most(*lengths)
        error += by_largest * _most(q.abs().amax(-1), k.abs().amax(-1))
        return error / math.sqrt(q.shape[-1])


def _most(of_q_BNH: Tensor, of_k_BKH: Tensor) -> Tensor:
    """What each query's and any key's give together, `[B, H, 1, N]`."""
    return of_q_BNH.transpose(1, 2)[:, :, None] * of_k_BKH.amax(1)[..., None, None]


def _factors(positions: Sequence[tuple[int, int, int]], like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every pair of channels, `[N, 1, D / 2]`."""
    radians = torch.from_numpy(angles(positions, like.shape[-1]))[:, None]
    return radians.cos().to(like.device, like.dtype), radians.sin().to(like.device, like.dtype)


def _turned(x_BNHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x_BNHD[..., 0::2], x_BNHD[..., 1::2]
    return torch.cat((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
