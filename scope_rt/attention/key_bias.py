"""The bias on past chunks is constant on contiguous keys, and every rank derives the same runs.

`kv_cache_attention_bias` weighs the keys of past chunks: `score += log(bias)`. The oldest latent
frame in view and the current chunk are exempt. So a few runs of keys say all of it, on the host.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BiasRun:
    """Contiguous keys that share one bias."""

    num_tokens: int
    log_bias: float
    """Natural logarithm; 0 leaves these keys as they are."""


@dataclass(frozen=True, slots=True)
class KeyBias:
    """What is added to the scores of all keys in view."""

    runs: tuple[BiasRun, ...]
    """In key (slot) order; neighbours differ."""

    @property
    def num_tokens(self) -> int:
        """Number of keys that the runs cover."""
        return sum(run.num_tokens for run in self.runs)

    def vector(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """The log bias of every key, `[K]`."""
        log_bias_K = torch.zeros(self.num_tokens, device=device, dtype=dtype)
        start = 0
        for run in self.runs:  # fills are ordered on the device: no copy from the host, no sync
            log_bias_K[start : start + run.num_tokens].fill_(run.log_bias)
            start += run.num_tokens
        return log_bias_K


def key_bias(
    frames_in_view: Sequence[int],
    *,
    num_current: int,
    frame_tokens: int,
    bias: float,
    log_weights: Sequence[float] = (),
) -> KeyBias | None:
    """The bias on every key in view, or None where nothing changes.

    `frames_in_view` names the latent frame of every frame slot, in slot order; the `num_current`
    latest are this chunk's. `bias` lies in (0, 1]. `log_weights` are those of the cache itself, by
    frame slot, and add up with it; without any, all slots weigh the same.
    """
    if bias == 1.0 and not any(log_weights):
        return None
    oldest = min(frames_in_view)
    first_current = max(frames_in_view) + 1 - num_current
    log_biases = [
        (math.log(bias) if oldest < frame < first_current else 0.0) + log_weight
        for frame, log_weight in zip(
            frames_in_view, log_weights or [0.0] * len(frames_in_view), strict=True
        )
    ]
    return KeyBias(
        tuple(
            BiasRun(len(list(slots)) * frame_tokens, log_bias)
            for log_bias, slots in groupby(log_biases)
        )
    )
