"""Where a chunk is written follows from its first frame alone, and eviction moves no byte.

Attention over a set of keys does not depend on their order, and K is cached after RoPE at its
absolute frame. So new frames overwrite the oldest slots in place, and attention reads the filled
slots as they lie. The window is host arithmetic on Python ints: every rank derives the same one
without communication or a device sync.
"""

from collections.abc import Iterable, Sequence

from torch import Tensor

from scope_contracts.cache_spec import CacheIndices, KVCacheSpec
from scope_contracts.errors import CacheError
from scope_rt.kv_cache.frame_cache import Segment, WriteWindow


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
    slots = [slot_of_frame(spec, frame) for frame in range(start_frame, end_frame)]
    oldest = max(spec.sink_frames, end_frame - spec.window_frames)
    held = [*range(min(spec.sink_frames, end_frame)), *range(oldest, end_frame)]
    view = tuple(sorted(held, key=lambda frame: slot_of_frame(spec, frame)))
    indices = CacheIndices(
        global_end_index=end_frame * spec.frame_tokens,
        local_end_index=len(view) * spec.frame_tokens,
    )
    return WriteWindow(
        segments=segments_of(slots, spec.frame_tokens), frames_in_view=view, indices=indices
    )


def segments_of(frame_slots: Iterable[int], frame_tokens: int) -> tuple[Segment, ...]:
    """Consecutive new frames go to `frame_slots`; neighbours are copied in one piece."""
    segments: list[Segment] = []
    for source, slot in enumerate(frame_slots):
        last = segments[-1] if segments else None
        if last is not None and last.slots.stop == slot * frame_tokens:
            grown = last.num_tokens + frame_tokens
            segments[-1] = Segment(source=last.source, slot=last.slot, num_tokens=grown)
        else:
            segments.append(
                Segment(
                    source=source * frame_tokens,
                    slot=slot * frame_tokens,
                    num_tokens=frame_tokens,
                )
            )
    return tuple(segments)


class NewestFrames:
    """The ring's policy: sinks and the newest frames; an evicted frame is one overwritten."""

    scores_digest = ""

    def __init__(self, spec: KVCacheSpec) -> None:
        self._spec = spec
        self._kept: tuple[int, ...] = ()

    @property
    def frames_kept(self) -> tuple[int, ...]:
        return self._kept

    @property
    def slots_kept(self) -> Sequence[int]:
        return range(len(self._kept))

    def plan(self, *, start_frame: int, num_frames: int) -> WriteWindow:
        return plan_write(self._spec, start_frame=start_frame, num_frames=num_frames)

    def observe(self, q_BTHD: Tensor, k_BKHD: Tensor) -> None:
        """Age alone decides."""

    def advance(self, window: WriteWindow) -> None:
        self._kept = window.frames_in_view

    def reset(self) -> None:
        self._kept = ()
