"""What rank0 keeps of finished chunks is enough to rebuild the cache of any rank, at any chunk.

A model that keeps its cache by clean passes is given the latents that a chunk sees beside itself:
sinks and window. A recompute model is given an anchor and its last latents. Its anchor is the
oldest decoded frame, encoded again as if a video began there: that is what it was trained on.
"""

from typing import Protocol

import torch
from torch import Tensor

from scope_contracts.errors import OrderError
from scope_rt.control.recompute import RecomputeAnchor
from scope_rt.models.recipe import Recipe


class AnchorEncoder(Protocol):
    """The latent frame `[B, 1, C, H/8, W/8]` of a video's first frames, uint8 `[B, T, H, W, 3]`."""

    def __call__(self, frames_BTHWC: Tensor) -> Tensor: ...


class ContextMemory:
    """The latents, and for a decoded anchor the frames, that the next recompute would need.

    `first_latent_frames` and `temporal_stride` are the codec's, in frames.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        anchor: RecomputeAnchor,
        encode_anchor: AnchorEncoder,
        first_latent_frames: int,
        temporal_stride: int,
    ) -> None:
        self._num_recent = recipe.context_frames - recipe.sink_frames
        self._num_sinks = recipe.sink_frames
        self._anchored = not recipe.clean_pass and anchor is RecomputeAnchor.DECODED
        self._encode_anchor = encode_anchor
        self._anchor_frames = first_latent_frames
        self._buffer_frames = first_latent_frames + temporal_stride * (recipe.context_frames - 1)
        self._recipe = recipe
        self.reset()

    def reset(self) -> None:
        """A new epoch: nothing of the old one is context."""
        self._num_frames = 0
        self._sinks = self._recent = torch.empty(0)
        self._frames = torch.empty(0, dtype=torch.uint8)

    @property
    def needs_frames(self) -> bool:
        """Whether a chunk must be decoded before the next recompute can be planned."""
        return self._anchored

    def remember_latents(self, latents_BFCHW: Tensor) -> None:
        """Keep what a later chunk may need of a chunk's latents."""
        if self._num_frames == 0:
            self._sinks = latents_BFCHW[:, :0]
            self._recent = latents_BFCHW[:, :0]
        missing = self._num_sinks - self._sinks.shape[1]
        if missing > 0:
            self._sinks = torch.cat([self._sinks, latents_BFCHW[:, :missing]], dim=1)
        recent = torch.cat([self._recent, latents_BFCHW], dim=1)
        self._recent = recent[:, max(0, recent.shape[1] - self._num_recent) :]
        self._num_frames += latents_BFCHW.shape[1]

    def remember_frames(self, frames_BTHWC: Tensor) -> None:
        """Keep the decoded frames that an anchor may come from."""
        if self._anchored:
            before = [self._frames] if len(self._frames) else []
            frames = torch.cat([*before, frames_BTHWC], dim=1)
            self._frames = frames[:, max(0, frames.shape[1] - self._buffer_frames) :]

    def context(self) -> Tensor:
        """`context_frames_override` of the next chunk, `[B, n, C, H/8, W/8]`; the oldest first.

        Raises:
            OrderError: the epoch has no chunk yet.
        """
        if self._num_frames == 0:
            raise OrderError("recompute: got no finished chunk in this epoch, want at least one")
        if self._recipe.clean_pass:
            first_recent = self._num_frames - self._recent.shape[1]
            return torch.cat([self._sinks[:, :first_recent], self._recent], dim=1)
        reaches_back = self._num_frames <= self._num_recent
        if reaches_back or not self._anchored:
            return self._recent  # its oldest latent is the epoch's own first, or R0 was asked for
        anchor = self._encode_anchor(self._frames[:, : self._anchor_frames])
        return torch.cat([anchor.to(self._recent.dtype), self._recent[:, 1:]], dim=1)

    @property
    def sinks(self) -> Tensor:
        """The epoch's first latent frames that a cache never evicts, `[B, n, C, H/8, W/8]`."""
        return self._sinks

    def resume(self, *, num_frames: int, sinks: Tensor | None) -> None:
        """Continue an epoch of which `num_frames` latent frames were generated.

        Its `sinks` are all that is remembered of it, until enough of what follows is remembered.
        """
        self.reset()
        if sinks is not None:
            self._num_frames, self._sinks = num_frames, sinks
            self._recent = sinks[:, :0]
