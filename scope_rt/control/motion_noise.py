"""The more a video moves, the less noise it is given: noise hides motion, and gives still pictures
room to change. Pure."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scope_contracts.errors import UserInputError

_FULL_MOTION = 0.2
"""Root mean square difference of neighbouring pictures, in -1 to 1, that counts as full motion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MotionNoise:
    """The noise scale of the next chunk, as in StreamDiffusionV2 (Feng et al., 2025, section on the
    motion-aware noise controller): d is the largest root mean square difference of neighbouring
    pictures, over `_FULL_MOTION` and at most 1; the scale moves towards high - (high - low) d, and
    keeps `inertia` of what it was.

    Raises:
        UserInputError: low and high are no scales in order.
    """

    low: float
    high: float
    inertia: float = 0.9
    scale: float | None = None
    """In effect; None before the first pictures."""

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high < 1:
            raise UserInputError(
                f"noise_scale: got {self.low:g} to {self.high:g}, want 0 < low <= high < 1"
            )

    def after(self, frames_THWC: NDArray[np.uint8]) -> "MotionNoise":
        """Once these pictures have come; `scale` is that of their chunk."""
        motion = 0.0
        if len(frames_THWC) > 1:
            pictures = frames_THWC.astype(np.float32) / 127.5
            squares = np.square(np.diff(pictures, axis=0)).mean(axis=(1, 2, 3))
            motion = min(1.0, float(np.sqrt(squares.max())) / _FULL_MOTION)
        wanted = self.high - (self.high - self.low) * motion
        before = wanted if self.scale is None else self.scale
        scale = self.inertia * before + (1 - self.inertia) * wanted
        return MotionNoise(low=self.low, high=self.high, inertia=self.inertia, scale=scale)
