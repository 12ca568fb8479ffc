"""What later chunks see of a chunk is its own result, except in a replay that is told otherwise.

A stream feeds on its own result, so a difference in rounding grows from chunk to chunk. A replay on
another TP degree therefore gives every chunk the recorded past, and compares what it makes of it.
"""

from typing import Protocol

from torch import Tensor


class Past(Protocol):
    """The latents `[B, F, C, H/8, W/8]` that later chunks are told `chunk_index` was."""

    def __call__(self, chunk_index: int, latents_BFCHW: Tensor) -> Tensor: ...


def own_past(chunk_index: int, latents_BFCHW: Tensor) -> Tensor:
    """The chunk as it was generated."""
    return latents_BFCHW
