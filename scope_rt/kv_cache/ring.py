"""Where a chunk is written follows from its first frame alone, and eviction moves no byte.

Attention over a set of keys does not depend on their order, and K is cached after RoPE at its
absolute frame. So new frames overwrite the oldest slots in place, and attention reads the filled
slots as they lie. The window is host arithmetic on Python ints: every rank derives the same one
without communication or a device sync.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from scope_contracts.cache_spec import CacheIndices, KVCacheSpec
from scope_contracts.errors import CacheError


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """`num_tokens` new tokens from `source` on go to the slots from `slot` on."""

    source: int
    slot: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteWindow:
    """Where one chunk's K/V go, and what is visible once they are there."""

    segments: tuple[Segment, ...]
    frames_in_view: tuple[int, ...]
    """Latent frame held by each frame slot, in slot order."""
    indices: CacheIndices
    """The cache's indices once the chunk is committed."""


def slot_of_frame(spec: KVCacheSpec, frame: int) -> int:
    """Frame slot of latent frame `frame`: the first `sink_frames` stay, later ones take turns."""
    if frame < spec.sink_frames:
        return frame
    return spec.sink_frames + (frame - spec.sink_frames) % spec.window_frames


def plan_write(spec: KVCacheSpec, *, start_frame: int, num_frames: int) -> WriteWindow:
    """The write window of a chunk of `num_frames` latent frames from `start_frame` on.

    Raises:
        CacheError: the chunk starts before frame 0, is empty, or is larger than what the ring
            keeps besides its sinks (it would overwrite its own first frames).
    """
    end_frame = start_frame + num_frames
    first_evictable = max(start_frame, spec.sink_frames)
    if start_frame < 0 or num_frames < 1 or end_frame - first_evictable > spec.window_frames:
        raise CacheError(
            f"write of frames {start_frame}..{end_frame - 1} does not fit a ring of "
            f"{spec.sink_frames} sink and {spec.window_frames} window frames; enlarge the window"
        )
    segments: list[Segment] = []
    for source, frame in enumerate(range(start_frame, end_frame)):
        slot, last = slot_of_frame(spec, frame), segments[-1] if segments else None
        tokens = spec.frame_tokens
        if last is not None and last.slot + last.num_tokens == slot * tokens:
            grown = last.num_tokens + tokens
            segments[-1] = Segment(source=last.source, slot=last.slot, num_tokens=grown)
        else:
            segments.append(Segment(source=source * tokens, slot=slot * tokens, num_tokens=tokens))
    oldest = max(spec.sink_frames, end_frame - spec.window_frames)
    held = [*range(min(spec.sink_frames, end_frame)), *range(oldest, end_frame)]
    view = tuple(sorted(held, key=lambda frame: slot_of_frame(spec, frame)))
    indices = CacheIndices(
        global_end_index=end_frame * spec.frame_tokens,
        local_end_index=len(view) * spec.frame_tokens,
    )
    return WriteWindow(segments=tuple(segments), frames_in_view=view, indices=indices)


class RingCache:
    """Keys and values of this rank's heads in all layers, allocated once and never grown.

    `k` and `v` are `[num_layers, batch, capacity_tokens, heads / tp, head_dim]`.
    """

    def __init__(
        self, spec: KVCacheSpec, *, tp_degree: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        spec.num_bytes(tp_degree)  # refuses heads that do not divide
        heads = spec.num_heads // tp_degree
        shape = (spec.num_layers, spec.batch, spec.capacity_tokens, heads, spec.head_dim)
        self.spec = spec
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.indices = CacheIndices(global_end_index=0, local_end_index=0)

    @property
    def num_bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def reset(self) -> None:
        """Forget everything: nothing is visible until the next write."""
        self.indices = CacheIndices(global_end_index=0, local_end_index=0)

    def window(self, *, start_frame: int, num_frames: int) -> WriteWindow:
        """Plan a chunk that continues, or rewrites, what is cached.

        Raises:
            CacheError: the chunk does not follow the last committed one, or does not fit.
        """
        if start_frame * self.spec.frame_tokens != self.indices.global_end_index:
            raise CacheError(
                f"chunk starts at frame {start_frame}, cache ends at token "
                f"{self.indices.global_end_index} of {self.spec.frame_tokens} a frame"
            )
        return plan_write(self.spec, start_frame=start_frame, num_frames=num_frames)

    def write(self, layer: int, window: WriteWindow, k_BTHD: Tensor, v_BTHD: Tensor) -> None:
        """Put a chunk's K/V into its slots; every call of a chunk writes the same ones.

        Raises:
            CacheError: the token count is not the window's; nothing was written.
        """
        num_tokens = sum(segment.num_tokens for segment in window.segments)
        if k_BTHD.shape[1] != num_tokens:
            raise CacheError(f"got K/V of {k_BTHD.shape[1]} tokens, the window has {num_tokens}")
        for segment in window.segments:
            target = slice(segment.slot, segment.slot + segment.num_tokens)
            source = slice(segment.source, segment.source + segment.num_tokens)
            self.k[layer, :, target] = k_BTHD[:, source]
            self.v[layer, :, target] = v_BTHD[:, source]

    def view(self, layer: int, window: WriteWindow) -> tuple[Tensor, Tensor]:
        """All visible K/V of a layer, in slot order: `[batch, tokens, heads / tp, head_dim]`."""
        end = window.indices.local_end_index
        return self.k[layer, :, :end], self.v[layer, :, :end]

    def commit(self, window: WriteWindow) -> None:
        """Advance the indices, once a chunk."""
        self.indices = window.indices
