"""What rank0 keeps of finished chunks is enough to rebuild the cache of any rank, at any chunk.

A model that keeps its cache by clean passes is given the latents that a chunk sees beside itself:
sinks and window. A recompute model is given an anchor and its last latents. Its anchor is the
oldest decoded frame, encoded again as if a video began there: that is what it was trained on.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from scope_contracts.errors import OrderError
from scope_rt.control.anchor import AnchorFrames
from scope_rt.control.recompute import RecomputeAnchor
from scope_rt.models.recipe import Recipe
from scope_rt.tensors import bytes_of


class Context(Protocol):
    """What a pipeline asks of its memory; `ContextMemory` says what each is."""

    @property
    def needs_frames(self) -> bool: ...

    @property
    def sinks(self) -> Tensor: ...

    def reset(self) -> None: ...

    def remember_latents(self, latents_BFCHW: Tensor) -> None: ...

    def remember_frames(self, frames_BTHWC: Tensor) -> None: ...

    def context(self, *, holds_cache: bool = False) -> Tensor: ...

    def evidence(
        self, sent_BFCHW: Tensor, *, holds_cache: bool = False
    ) -> Iterator[tuple[str, str, str]]: ...

    def resume(self, *, num_frames: int, sinks: Tensor | None) -> None: ...


class ContextMemory:
    """The latents, and for a decoded anchor the frames, that the next recompute would need."""

    def __init__(
        self, recipe: Recipe, anchor_frames: AnchorFrames, *, anchor: RecomputeAnchor
    ) -> None:
        self._num_rebuilt = recipe.context_frames - recipe.sink_frames
        """Latest frames of a context that has sinks beside them."""
        self._num_recent = recipe.context_frames if recipe.recaches else self._num_rebuilt
        self._num_sinks = recipe.sink_frames
        self._anchored = not recipe.clean_pass and anchor is RecomputeAnchor.DECODED
        self._recipe, self._anchor_frames = recipe, anchor_frames
        self.reset()

    def reset(self) -> None:
        """A new epoch: nothing of the old one is context."""
        self._num_frames = 0
        self._sinks = self._recent = torch.empty(0)
        self._sink_digests: tuple[str, ...] = ()
        self._recent_digests: tuple[str, ...] = ()
        """Of each latent frame, from when it came in."""
        self._anchor_frames.reset()

    @property
    def needs_frames(self) -> bool:
        """Whether a chunk must be decoded before the next recompute can be planned."""
        return self._anchored

    def remember_latents(self, latents_BFCHW: Tensor) -> None:
        """Keep what a later chunk may need of a chunk's latents."""
        if self._num_frames == 0:
            self._sinks = latents_BFCHW[:, :0]
            self._recent = latents_BFCHW[:, :0]
        digests = digests_of(latents_BFCHW)
        missing = self._num_sinks - self._sinks.shape[1]
        if missing > 0:
            self._sinks = torch.cat([self._sinks, latents_BFCHW[:, :missing]], dim=1)
            self._sink_digests += digests[:missing]
        recent = torch.cat([self._recent, latents_BFCHW], dim=1)
        first = max(0, recent.shape[1] - self._num_recent)
        self._recent = recent[:, first:]
        self._recent_digests = (*self._recent_digests, *digests)[first:]
        self._num_frames += latents_BFCHW.shape[1]

    def remember_frames(self, frames_BTHWC: Tensor) -> None:
        """Keep the decoded frames that an anchor may come from."""
        if self._anchored:
            self._anchor_frames.remember(frames_BTHWC)

    def context(self, *, holds_cache: bool = False) -> Tensor:
        """`context_frames_override` of the next chunk, `[B, n, C, H/8, W/8]`; the oldest first.

        Args:
            holds_cache: whether ranks hold what a model that re-caches makes again in place.

        Raises:
            OrderError: the epoch has no chunk yet.
        """
        if self._num_frames == 0:
            raise OrderError("recompute: got no finished chunk in this epoch, want at least one")
        if self._recipe.recaches and holds_cache:
            return self._recent
        if self._recipe.clean_pass:
            sinks, recent = self._rebuilt()
            return torch.cat([self._sinks[:, sinks], self._recent[:, recent]], dim=1)
        if not self._needs_anchor:
            return self._recent  # its oldest latent is the epoch's own first, or R0 was asked for
        return torch.cat(
            [self._anchor_frames.latent(self._recent.dtype), self._recent[:, 1:]], dim=1
        )

    def _rebuilt(self) -> tuple[slice, slice]:
        """What a rebuilt cache is given of the sinks, and of the latest frames."""
        num_recent = min(self._num_rebuilt, self._recent.shape[1])
        num_sinks = max(0, self._num_frames - num_recent)
        return slice(0, num_sinks), slice(self._recent.shape[1] - num_recent, None)

    def evidence(
        self, sent_BFCHW: Tensor, *, holds_cache: bool = False
    ) -> Iterator[tuple[str, str, str]]:
        """What proves that `sent_BFCHW` is `context()`: what is compared, its digest now, and the
        one it had when it came in. An anchor is encoded again."""
        now = digests_of(sent_BFCHW)
        if self._recipe.recaches and holds_cache:
            noted = self._recent_digests
        elif self._recipe.clean_pass:
            sinks, recent = self._rebuilt()
            noted = (*self._sink_digests[sinks], *self._recent_digests[recent])
        elif self._needs_anchor:
            yield self._anchor_frames.evidence()
            anchor = self._anchor_frames.latent(self._recent.dtype).to(sent_BFCHW.dtype)
            noted = (*digests_of(anchor), *self._recent_digests[1:])
        else:
            noted = self._recent_digests
        yield "the context of a recompute", " ".join(now), " ".join(noted)

    @property
    def _needs_anchor(self) -> bool:
        return self._anchored and self._num_frames > self._num_recent

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
            self._sink_digests = digests_of(sinks)
            self._recent = sinks[:, :0]


def digests_of(latents_BFCHW: Tensor) -> tuple[str, ...]:
    """One for each latent frame: its XXH3, which finds damage. They never leave this process."""
    batch, num_frames = latents_BFCHW.shape[:2]
    if batch != 1 or not latents_BFCHW.numel():
        return tuple(xxh3_64_hexdigest(bytes_of(frame)) for frame in latents_BFCHW.unbind(1))
    latents = bytes_of(latents_BFCHW)  # one after the other
    size = len(latents) // num_frames
    return tuple(
        xxh3_64_hexdigest(latents[start : start + size]) for start in range(0, len(latents), size)
    )
