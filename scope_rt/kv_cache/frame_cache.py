"""What a stream's generator asks of its cache; storage, codec and policy are the cache's business.

A chunk asks for its window once, shows every call's K/V of every layer to `update`, and advances
once. Whatever a cache keeps, every rank derives the same window: from the start frame alone, or
from scores that were summed over the ranks first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from scope_contracts.cache_spec import CacheIndices, KVCacheSpec
from scope_rt.kv_cache.counters import CacheCounters


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """`num_tokens` new tokens from `source` on go to the slots from `slot` on."""

    source: int
    slot: int
    num_tokens: int

    @property
    def sources(self) -> slice:
        return slice(self.source, self.source + self.num_tokens)

    @property
    def slots(self) -> slice:
        return slice(self.slot, self.slot + self.num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteWindow:
    """Where one chunk's K/V go, and what is visible once they are there."""

    segments: tuple[Segment, ...]
    frames_in_view: tuple[int, ...]
    """Latent frame held by each frame slot, in slot order; `update` shows them in this order."""
    indices: CacheIndices
    """The cache's indices once the chunk is part of it."""
    log_weights: tuple[float, ...] = ()
    """Added to the scores of each frame slot's keys; empty where all weigh the same."""

    num_passing: int = 0
    """Tokens at the beginning of the chunk that attend, and are not kept."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the chunk."""
        return self.num_passing + sum(segment.num_tokens for segment in self.segments)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choice:
    """What one choice of frames by attention was made of, for who makes it again.

    Scores are on the host, in float64; all are by frame slot in view.
    """

    frames: tuple[int, ...]
    """Latent frames it was made among, the chunk's included."""
    found: Tensor
    """Scores as they were found."""
    masses: Sequence[Tensor]
    """What every layer added, of this rank's heads, in order; none where a chunk adds nothing."""
    mass: Tensor
    """Their sum over layers and ranks, on the cache's device."""
    scores: Tensor
    """By which was chosen."""
    kept: tuple[int, ...]
    """Latent frames that stay, in slot order."""


class FrameCache(Protocol):
    """Keys and values of this rank's heads in all layers, allocated once and never grown."""

    counters: CacheCounters

    @property
    def spec(self) -> KVCacheSpec: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def indices(self) -> CacheIndices:
        """Where the next chunk goes."""
        ...

    @property
    def frames_kept(self) -> tuple[int, ...]:
        """Latent frames that are cached between chunks, in slot order: equal on all ranks."""
        ...

    @property
    def frames_by_slot(self) -> Mapping[int, int]:
        """The latent frame that lies in each frame slot, evicted ones too; a gist as above."""
        ...

    @property
    def scores_digest(self) -> str:
        """BLAKE2b over the scores by which frames stay, by frame; empty where there are none."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        ...

    def window(self, *, start_frame: int, num_frames: int) -> WriteWindow:
        """Plan a chunk that continues what is cached; planned again, it is the same.

        Raises:
            CacheError: the chunk does not follow the last one, does not fit, or the window names
            another frame than lies in a slot.
        """
        ...

    def window_in_place(self, *, start_frame: int, num_frames: int) -> WriteWindow:
        """Plan to make the newest frames again, where they lie.

        Those that the cache holds no more attend, and are not kept; sinks stay as they are unless
        the frames begin with them.

        Raises:
            CacheError: the frames do not end where the cache does.
        """
        ...

    def update(
        self,
        layer: int,
        window: WriteWindow,
        k_BTHD: Tensor,
        v_BTHD: Tensor,
        *,
        is_last: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Take a chunk's K/V, and give all that is visible: `[B, K, heads, head_dim]` each.

        Every call of a chunk writes the same window, and later chunks see what the last call of
        this one gave (`is_last`). What is returned is only to be read, before the next `update`.

        Raises:
            CacheError: no window was planned, or the token count is not the window's; nothing was
                written.
        """
        ...

    def observe(self, layer: int, window: WriteWindow, q_BTHD: Tensor, k_BKHD: Tensor) -> None:
        """See what a clean chunk attends to, where `spec.needs_attention_scores`.

        `k_BKHD` is what `update` returned.
        """
        ...

    def take_choices(self) -> list[Choice]:
        """Those since the last call or reset, two at most, the newest last; none where age alone
        decides."""
        ...

    def advance(self, window: WriteWindow) -> None:
        """Make the chunk part of the cache, once, after its last call.

        Raises:
            CacheError: no window was planned, or a layer has no rows of the chunk's last call;
                nothing was changed.
        """
        ...

    def reset(self) -> None:
        """Forget everything: nothing is visible until the next chunk. Counters go on."""
        ...

    def damaged(self, layers: range) -> list[tuple[int, int]]:
        """Layer and latent frame of cached rows that are not what was written.

        Reads all rows of `layers` that are cached now, and blocks until that is done; rows of any
        layer that were overwritten since the last call were read before. A gist counts as the first
        frame it stands for. Empty for a cache that keeps no digests. Ask between chunks.
        """
        ...

    def rows(self, layer: int, slots: slice) -> tuple[Tensor, Tensor]:
        """Keys and values as they lie at token slots, decoded: `[B, K, heads, head_dim]` each.

        Those of past frames are what `update` shows. A view of the cache's memory where rows lie
        together and are not encoded; ask before the next `window`.
        """
        ...

    def cached(self, layer: int) -> tuple[Tensor, Tensor]:
        """A copy of all cached keys and values of a layer, decoded, in slot order.

        Ask between chunks: a chunk in flight may already lie where it evicts.
        """
        ...

    def digest(self) -> str:
        """BLAKE2b over every cached row, decoded, and its position, by position, and layer.

        Scores count too. Ask between chunks, as for `cached`.
        """
        ...
