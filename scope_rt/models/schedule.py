"""Noise levels come from one table, so a timestep means the same sigma on every rank."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

NUM_TRAIN_TIMESTEPS = 1000
NOISE_LEVELS = 64
"""At as many levels may a chunk begin that is given pictures."""


@dataclass(frozen=True, slots=True)
class FlowSchedule:
    """The shifted flow-matching schedule of Wan (Esser et al., 2024, eq. 23)."""

    shift: float = 5.0
    num_train_timesteps: int = NUM_TRAIN_TIMESTEPS

    @staticmethod
    def shifted(sigma: Tensor, *, shift: float) -> Tensor:
        """`shift * s / (1 + (shift - 1) * s)`: more steps where noise is strong."""
        return shift * sigma / (1 + (shift - 1) * sigma)

    @cache  # noqa: B019 - a schedule is a value; a process knows a handful of them
    def table(self) -> Tensor:
        """Sigma of every training step, falling from 1, float64."""
        n = self.num_train_timesteps
        return self.shifted(torch.arange(n, 0, -1, dtype=torch.float64) / n, shift=self.shift)

    @cache  # noqa: B019 - as above; every chunk asks
    def warp(self, nominal: tuple[float, ...]) -> tuple[float, ...]:
        """Nominal steps (1000, 750, ...) to the timesteps a Self-Forcing model is fed."""
        table = torch.cat([self.table() * self.num_train_timesteps, torch.zeros(1)])
        return tuple(float(table[self.num_train_timesteps - round(step)]) for step in nominal)

    def nearest(self, sigma: float) -> float:
        """The timestep whose sigma is nearest to `sigma`."""
        table = self.table()
        return float(table[(table - sigma).abs().argmin()] * self.num_train_timesteps)

    def sigma(self, timestep: float) -> float:
        """Sigma of the table's entry nearest to `timestep` (0..1000)."""
        table = self.table()
        nearest = (table * self.num_train_timesteps - timestep).abs().argmin()
        return float(table[nearest])
