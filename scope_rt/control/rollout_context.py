"""A model with rollouts begins each anew from the end of the last one: a picture, and its latents.

The picture is the oldest of those that the overlap shows, encoded as if a video began there
(CausVid's long videos). What a rollout has made so far rebuilds its cache, frame for frame.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from scope_contracts.errors import OrderError
from scope_rt.control.anchor import AnchorFrames
from scope_rt.control.context import digests_of
from scope_rt.models.recipe import Recipe


class RolloutMemory:
    """As `ContextMemory`, for recipes with `rollout_frames`."""

    needs_frames = True

    def __init__(self, recipe: Recipe, anchor_frames: AnchorFrames) -> None:
        self._recipe, self._anchor_frames = recipe, anchor_frames
        self._num_latents = recipe.rollout_overlap - 1
        """That the next rollout begins with, beside its anchor."""
        self.reset()

    def reset(self) -> None:
        """A new epoch: nothing of the old one is context."""
        self._num_frames = 0
        self._rollout = torch.empty(0)
        self._digests: tuple[str, ...] = ()
        """Of each latent frame of the rollout, from when it came in."""
        self._anchor_frames.reset()

    @property
    def sinks(self) -> Tensor:
        """None are kept for ever."""
        return self._rollout[:, :0]

    def remember_latents(self, latents_BFCHW: Tensor) -> None:
        """Keep a chunk's latents, which may be the first of a rollout."""
        if self._num_frames == 0 or not len(self._rollout):
            self._rollout = latents_BFCHW[:, :0]
        elif self._recipe.rolls_at(self._num_frames):
            self._rollout = self._beginning()
            self._digests = digests_of(self._rollout)
        self._rollout = torch.cat([self._rollout, latents_BFCHW], dim=1)
        self._digests += digests_of(latents_BFCHW)
        self._num_frames += latents_BFCHW.shape[1]

    def remember_frames(self, frames_BTHWC: Tensor) -> None:
        """Keep the decoded frames that the next anchor comes from."""
        self._anchor_frames.remember(frames_BTHWC)

    def context(self, *, holds_cache: bool = False) -> Tensor:
        """`context_frames_override` of the next chunk, `[B, n, C, H/8, W/8]`; the oldest first.

        Raises:
            OrderError: the epoch has no chunk yet.
        """
        if self._num_frames == 0:
            raise OrderError("recompute: got no finished chunk in this epoch, want at least one")
        return self._beginning() if self._recipe.rolls_at(self._num_frames) else self._rollout

    def evidence(
        self, sent_BFCHW: Tensor, *, holds_cache: bool = False
    ) -> Iterator[tuple[str, str, str]]:
        """As `ContextMemory.evidence`."""
        noted = self._digests
        if self._recipe.rolls_at(self._num_frames):
            yield self._anchor_frames.evidence()
            anchor = self._anchor_frames.latent(self._rollout.dtype).to(sent_BFCHW.dtype)
            noted = (*digests_of(anchor), *noted[len(noted) - self._num_latents :])
        yield "the context of a recompute", " ".join(digests_of(sent_BFCHW)), " ".join(noted)

    def resume(self, *, num_frames: int, sinks: Tensor | None) -> None:
        """Continue an epoch of which `num_frames` latent frames were generated; what follows, a
        whole rollout at least, is all that is remembered of it."""
        self.reset()
        self._num_frames = num_frames

    def _beginning(self) -> Tensor:
        """What the next rollout begins with."""
        latents = self._rollout[:, self._rollout.shape[1] - self._num_latents :]
        return torch.cat([self._anchor_frames.latent(self._rollout.dtype), latents], dim=1)
