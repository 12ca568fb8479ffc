"""Which rows stay is a pure function of scores and positions: equal scores, equal rows, everywhere.

A policy holds sizes and no state; it moves no row and knows no cache. A row may be one token of a
language model or one latent frame of a video. Ranks that share heads sum their scores before they
ask.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from scope_contracts.errors import UserInputError, mismatch


class EvictionPolicy(Protocol):
    """Chooses the rows that stay when there are more than `capacity`."""

    @property
    def capacity(self) -> int:
        """Rows that stay."""
        ...

    @property
    def peak(self) -> int:
        """Most rows between two steps of one row each, once an eviction has run."""
        ...

    @property
    def needs_scores(self) -> bool:
        """Whether scores matter at all; if not, they may be zeros."""
        ...

    def due(self, num_steps: int) -> bool:
        """Whether to evict after that many one-row steps since the last longer one (0: itself)."""
        ...

    def ranked(self, score: Tensor, positions: Tensor | None = None) -> Tensor:
        """All rows, the one to keep first ahead: int64, shape of `score [..., K]`.

        Sinks, then the recent from the newest back, then the middle by score, then padding.

        `positions`, int64 and broadcastable to `score`, gives the age of each row (lower is
        older, -1 marks padding); without it rows lie in order and all are real.
        """
        ...

    def kept(self, score: Tensor, positions: Tensor | None = None) -> Tensor:
        """Rows that stay, int64 `[..., min(K, capacity)]`, ascending: the first of `ranked`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HeavyHitters:
    """The oldest `num_sink`, the newest `num_recent`, and the `budget` best scored between them.

    H2O (Zhang et al. 2023, section 4), with the sinks of StreamingLLM (Xiao et al. 2023). Of equal
    scores the older row wins. Padding is no sink, and stays only where fewer than `capacity` rows
    are real.

    Raises `UserInputError` for sizes that keep nothing, or are negative.
    """

    budget: int
    num_sink: int
    num_recent: int
    evict_every: int = 1
    """One-row steps from one eviction to the next."""

    def __post_init__(self) -> None:
        for name, size, least in (
            ("budget", self.budget, 0),
            ("num_sink", self.num_sink, 0),
            ("num_recent", self.num_recent, 0),
            ("evict_every", self.evict_every, 1),
        ):
            if size < least:
                fix = f"raise it to {least} or more"
                raise UserInputError(mismatch(name, got=size, want=f"at least {least}", fix=fix))
        if not self.capacity:
            raise UserInputError(
                "budget + num_sink + num_recent: got 0, want at least 1 row that stays; "
                "raise num_recent"
            )

    @property
    def capacity(self) -> int:
        return self.num_sink + self.budget + self.num_recent

    @property
    def peak(self) -> int:
        return self.capacity + self.evict_every - 1

    @property
    def needs_scores(self) -> bool:
        return self.budget > 0

    def due(self, num_steps: int) -> bool:
        return num_steps % self.evict_every == 0

    def ranked(self, score: Tensor, positions: Tensor | None = None) -> Tensor:
        num_rows = score.shape[-1]
        if positions is None:
            positions = torch.arange(num_rows, device=score.device)
        positions = positions.expand(score.shape)
        by_age = positions.argsort(dim=-1, stable=True)  # padding comes first
        num_padding = (positions < 0).sum(dim=-1, keepdim=True)
        age = torch.arange(num_rows, device=score.device) - num_padding
        is_recent = age >= num_rows - num_padding - self.num_recent
        standing = torch.where(is_recent, 2 + age, 1)
        standing = torch.where(age < self.num_sink, 3 * num_rows - age, standing)
        standing = torch.where(age < 0, 0, standing)
        # Two stable sorts: by score, then by standing, so that no score can outbid a sink.
        best = score.gather(-1, by_age).argsort(dim=-1, descending=True, stable=True)
        best = best.gather(
            -1, standing.gather(-1, best).argsort(dim=-1, descending=True, stable=True)
        )
        return by_age.gather(-1, best)

    def kept(self, score: Tensor, positions: Tensor | None = None) -> Tensor:
        return self.ranked(score, positions)[..., : self.capacity].sort(dim=-1).values


def sliding_window(*, num_recent: int, num_sink: int = 0, evict_every: int = 1) -> HeavyHitters:
    """Sinks and recent rows alone (StreamingLLM): heavy hitters with no budget for any."""
    return HeavyHitters(budget=0, num_sink=num_sink, num_recent=num_recent, evict_every=evict_every)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomRows:
    """A baseline: `sizes`, with the middle drawn by lot. A row's lot follows from its position."""

    sizes: HeavyHitters
    seed: int = 0

    @property
    def capacity(self) -> int:
        return self.sizes.capacity

    @property
    def peak(self) -> int:
        return self.sizes.peak

    @property
    def needs_scores(self) -> bool:
        return False

    def due(self, num_steps: int) -> bool:
        return self.sizes.due(num_steps)

    def ranked(self, score: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(score.shape[-1], device=score.device)
        return self.sizes.ranked(self._lots(positions).expand(score.shape), positions)

    def kept(self, score: Tensor, positions: Tensor | None = None) -> Tensor:
        return self.ranked(score, positions)[..., : self.capacity].sort(dim=-1).values

    def _lots(self, positions: Tensor) -> Tensor:
        """32 well-mixed bits a position (the finalizer of MurmurHash3)."""
        bits = (positions + self.seed * 0x9E3779B1) & 0xFFFFFFFF
        for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
            bits = ((bits ^ (bits >> shift)) * factor) & 0xFFFFFFFF
        return bits ^ (bits >> 16)
