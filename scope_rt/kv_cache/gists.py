"""A stream remembers minutes: what leaves the window is summed up once, and nothing is redone.

What a chunk sees depends on distance alone: sinks and the newest frames in full, before them gists
that stand for more frames the older they are. A gist is written when its first frame is about to
leave the window, from frames or finer gists that still lie there, into a slot behind the window's;
so the view stays one piece and copies nothing, as a ring's. Pooling is the same mean on every rank,
head by head, without communication. A prompt change keeps gists, a hard cut and a recompute drop
them.

A gist is the mean of keys and of values at each place of a frame. Keys are pooled as they are
cached, rotated to their own times: what turns fast within a group averages out, and what is left is
what the group's frames agree on, at the group's centre. A gist that pools n frames weighs 1 / n**2
of a frame in attention, so that all that is old together weighs less than one frame: a model that
was never taught gists keeps to what it knows (with equal weights the embedded one loses 3.9 dB).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from scope_contracts.cache_spec import KVCacheSpec
from scope_contracts.errors import CacheError
from scope_rt.kv_cache.frame_cache import WriteWindow
from scope_rt.kv_cache.ring import plan_write, slot_of_frame
from scope_rt.kv_cache.row_ledger import RowLedger
from scope_rt.kv_cache.slot_cache import InPlace, SlotCache


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooling:
    """One gist to write: the mean of frame slots `sources` goes to frame slot `target`."""

    target: int
    sources: tuple[int, ...]


class GistFrames:
    """A slot policy: the ring's slots, then those of each level's gists."""

    scores_digest = ""

    def __init__(self, spec: KVCacheSpec) -> None:
        self._spec, self._gists = spec, spec.gists
        self._kept: tuple[int, ...] = ()
        self._num_left = 0
        """Frames outside the window of the next chunk: their gists are written."""

    @property
    def frames_kept(self) -> tuple[int, ...]:
        """As `SlotPolicy` says; a gist counts as the first frame it stands for."""
        return self._kept + self._gists_at(self._num_left)

    @property
    def slots_kept(self) -> Sequence[int]:
        return range(len(self.frames_kept))

    def plan(self, *, start_frame: int, num_frames: int) -> WriteWindow:
        window = plan_write(self._spec, start_frame=start_frame, num_frames=num_frames)
        end_frame = start_frame + num_frames
        if self._left_at(end_frame) != self._num_left:
            raise CacheError(
                f"a chunk of {num_frames} frames follows gists that were written for one of "
                f"{self._spec.block_frames}; give chunks of that length"
            )
        shown = map(len, self._gists.in_view(self._num_left))
        log_weights = [
            _log_weight(self._gists.group, level)
            for level, count in enumerate(shown)
            for _ in range(count)
        ]
        return replace(
            window,
            frames_in_view=window.frames_in_view + self._gists_at(self._num_left),
            indices=self._spec.indices_at(end_frame),
            log_weights=(*[0.0] * len(window.frames_in_view), *log_weights),
        )

    def observe(self, q_BTHD: Tensor, k_BKHD: Tensor) -> None:
        """Distance alone decides."""

    def advance(self, window: WriteWindow) -> None:
        num_ring = len(window.frames_in_view) - len(self._gists_at(self._num_left))
        self._kept = window.frames_in_view[:num_ring]

    def due(self, end_frame: int) -> list[Pooling]:
        """The gists to write before the chunk that follows `end_frame`, in this order.

        Coarser ones come first: they pool finer ones that the next step overwrites.
        """
        num_left, due = self._left_at(end_frame + self._spec.block_frames), []
        for left in range(self._num_left + 1, num_left + 1):
            before, after = self._gists.in_view(left - 1), self._gists.in_view(left)
            for level in reversed(range(self._gists.num_levels)):
                for gist in range(before[level].stop, after[level].stop):
                    first = gist * self._gists.group
                    children = range(first, first + self._gists.group)
                    sources = tuple(self._slot(level - 1, child) for child in children)
                    due.append(Pooling(target=self._slot(level, gist), sources=sources))
        self._num_left = num_left
        return due

    def reset(self) -> None:
        self._kept, self._num_left = (), 0

    def _left_at(self, end_frame: int) -> int:
        """Frames outside the window of a chunk that ends there."""
        return max(0, end_frame - self._spec.sink_frames - self._spec.window_frames)

    def _gists_at(self, num_left: int) -> tuple[int, ...]:
        """First frames of the gists in view, in slot order."""
        frames_of_slots = {
            self._slot(level, gist): gist * self._gists.group ** (level + 1)
            for level, shown in enumerate(self._gists.in_view(num_left))
            for gist in shown
        }
        return tuple(self._spec.sink_frames + first for _, first in sorted(frames_of_slots.items()))

    def _slot(self, level: int, number: int) -> int:
        """Frame slot of a gist; level -1 is the frames themselves, counted behind the sinks."""
        spec, group = self._spec, self._gists.group
        if level < 0:
            return slot_of_frame(spec, spec.sink_frames + number)
        return spec.sink_frames + spec.window_frames + level * group + number % group


def _log_weight(group: int, level: int) -> float:
    """What is added to the scores of gists of a level, finest 0."""
    return -2 * (level + 1) * math.log(group)


class GistCache(SlotCache):
    """A `SlotCache` that writes gists when it advances."""

    def __init__(
        self,
        spec: KVCacheSpec,
        *,
        policy: GistFrames,
        storage: InPlace,
        ledger: RowLedger | None = None,
    ) -> None:
        super().__init__(spec, policy=policy, storage=storage, ledger=ledger)
        self._gist_policy = policy
        self.see_pooled: Callable[[GistCache, Pooling], None] = _ignore
        """Is told of every gist when all layers have it, while its sources still lie there."""

    def advance(self, window: WriteWindow) -> None:
        super().advance(window)
        num_visible, tokens = len(self.frames_kept), self.spec.frame_tokens
        due = self._gist_policy.due(window.indices.global_end_index // tokens)
        for pooling in due:
            self._verify_leaving([pooling.target])
            for layer in range(self.spec.num_layers):
                self._pool(layer, pooling)
            self._frame_at[pooling.target] = self._frame_at[pooling.sources[0]]
            self.see_pooled(self, pooling)
        rows = tokens * self.spec.num_layers * self.spec.batch
        self.counters.rows_written += len(due) * rows
        self.counters.rows_evicted += (num_visible + len(due) - len(self.frames_kept)) * rows

    def _pool(self, layer: int, pooling: Pooling) -> None:
        pieces = [self.storage.rows.read(layer, self._slots(source)) for source in pooling.sources]
        gist = [
            torch.stack(plane).to(torch.promote_types(plane[0].dtype, torch.float32)).mean(0)
            for plane in zip(*pieces, strict=True)
        ]
        dtype = pieces[0][0].dtype
        self._write(layer, self._slots(pooling.target), [plane.to(dtype) for plane in gist])

    def _slots(self, frame_slot: int) -> slice:
        tokens = self.spec.frame_tokens
        return slice(frame_slot * tokens, (frame_slot + 1) * tokens)


def _ignore(cache: GistCache, pooling: Pooling) -> None:
    """Nobody watches."""
