"""What later chunks see of a chunk is its own result, except in a replay across TP degrees.

A stream feeds on its own result, so a difference in rounding grows from chunk to chunk. A replay at
another TP degree therefore feeds back the recorded latents, and compares what it makes of them.
"""

from typing import Protocol

from torch import Tensor


class Feedback(Protocol):
    """The latents `[B, F, C, H/8, W/8]` that later chunks see in the place of `chunk_index`."""

    def __call__(self, chunk_index: int, latents_BFCHW: Tensor) -> Tensor: ...


def own_latents(chunk_index: int, latents_BFCHW: Tensor) -> Tensor:
    """The chunk as it was generated."""
    return latents_BFCHW
