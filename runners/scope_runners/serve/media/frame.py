"""A frame at the moment at which it is shown."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlayedFrame:
    """One picture, uint8 `[H, W, 3]`; nobody may change it."""

    frame_HWC: NDArray[np.uint8]
    number: int
    """Frames that were shown before it."""
    time_90k: int
    """When it is shown, since the first frame, in 1/90,000 s; it only rises."""
    chunk_index: int
    cache_epoch: int
    is_first: bool
    """Of its chunk."""
