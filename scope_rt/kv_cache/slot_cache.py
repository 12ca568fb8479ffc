"""A policy gives every frame a slot, a storage gives every slot a place, a codec writes it down.

The chunk in flight always attends to its own exact keys and values, as it gave them. A codec sees
them once, at the chunk's last call, so a number is lossy only as part of the past, and no second
copy of the chunk is kept. A chunk that a layer wrote no row of never becomes past.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from scope_contracts.cache_spec import KVCacheSpec
from scope_contracts.errors import CacheError
from scope_contracts.row_format import CodecKind
from scope_rt.kv_cache.counters import CacheCounters
from scope_rt.kv_cache.frame_cache import Choice, WriteWindow
from scope_rt.kv_cache.row_digest import row_digest
from scope_rt.kv_cache.row_ledger import RowLedger
from scope_rt.kv_cache.row_store import RowStore, Slots
from scope_rt.kv_cache.span import SpanState


class SlotPolicy(Protocol):
    """Which frame has which slot; host arithmetic, the same on every rank."""

    @property
    def frames_kept(self) -> tuple[int, ...]:
        """Frames that are cached between chunks, in slot order."""
        ...

    @property
    def slots_kept(self) -> Sequence[int]:
        """Their frame slots."""
        ...

    @property
    def scores_digest(self) -> str:
        """As `FrameCache` says."""
        ...

    def plan(self, *, start_frame: int, num_frames: int) -> WriteWindow:
        """Slots for a chunk; changes nothing. Raises `CacheError` where it does not fit."""
        ...

    def observe(self, q_BTHD: Tensor, k_BKHD: Tensor) -> None:
        """A layer of the chunk's last call: its queries, and the keys in view in slot order."""
        ...

    def advance(self, window: WriteWindow) -> None:
        """The chunk is part of the past; choose what of it all stays."""
        ...

    def reset(self) -> None: ...


@runtime_checkable
class ChoosingPolicy(Protocol):
    """A `SlotPolicy` that chooses frames by attention, and says what of."""

    def take_choices(self) -> list[Choice]:
        """As `FrameCache` says."""
        ...


class FrameStorage(Protocol):
    """Where slots lie."""

    @property
    def rows(self) -> RowStore: ...

    def open(self, slots: slice) -> None:
        """Have a place for token slots that are about to be written.

        Raises:
            CacheError: there is no room; nothing was changed.
        """
        ...

    def place(self, slots: slice) -> Slots:
        """Where token slots lie: a slice where they lie together, else indices to gather."""
        ...

    def clear(self) -> None:
        """Nothing is cached any more."""
        ...


class InPlace:
    """Slots lie one after another, so a view of them copies nothing."""

    def __init__(self, rows: RowStore) -> None:
        self.rows = rows

    def open(self, slots: slice) -> None:
        """There is a place for all, from the beginning."""

    def place(self, slots: slice) -> Slots:
        return slots

    def clear(self) -> None:
        """The memory stays."""


class SlotCache:
    """A `FrameCache` from a policy and a storage, whose rows know their codec."""

    def __init__(
        self,
        spec: KVCacheSpec,
        *,
        policy: SlotPolicy,
        storage: FrameStorage,
        ledger: RowLedger | None = None,
    ) -> None:
        """Without a `ledger`, nothing is known of damage."""
        self.spec, self.policy, self.storage, self._ledger = spec, policy, storage, ledger
        self._choosing = policy if isinstance(policy, ChoosingPolicy) else None
        self.counters = CacheCounters()
        self.indices = spec.indices_at(0)
        lacks = "no rows of this chunk; show its last call to update"
        self._spans: SpanState[WriteWindow, None] = SpanState(lacks, opener="window")
        self._frame_at: dict[int, int] = {}
        """The latent frame of every frame slot that was written since the last reset."""
        self._left_damaged: list[tuple[int, int]] = []
        self._is_exact = storage.rows.format.codec is CodecKind.IDENTITY

    @property
    def device(self) -> torch.device:
        return self.storage.rows.device

    @property
    def frames_kept(self) -> tuple[int, ...]:
        return self.policy.frames_kept

    @property
    def frames_by_slot(self) -> Mapping[int, int]:
        return self._frame_at

    @property
    def scores_digest(self) -> str:
        return self.policy.scores_digest

    @property
    def num_bytes(self) -> int:
        return self.storage.rows.num_bytes

    def window(self, *, start_frame: int, num_frames: int) -> WriteWindow:
        """As `FrameCache` says; takes the storage's room for the chunk as well."""
        if start_frame * self.spec.frame_tokens != self.indices.global_end_index:
            raise CacheError(
                f"chunk starts at frame {start_frame}, cache ends at token "
                f"{self.indices.global_end_index} of {self.spec.frame_tokens} a frame"
            )
        return self._opened(
            self.policy.plan(start_frame=start_frame, num_frames=num_frames), start_frame
        )

    def window_in_place(self, *, start_frame: int, num_frames: int) -> WriteWindow:
        tokens, end_frame = self.spec.frame_tokens, start_frame + num_frames
        if start_frame < 0 or end_frame * tokens != self.indices.global_end_index:
            raise CacheError(
                f"frames {start_frame} to {end_frame - 1} are to be made again, cache ends at "
                f"token {self.indices.global_end_index} of {tokens} a frame"
            )
        num_kept = min(num_frames, self.spec.window_frames) if start_frame else num_frames
        plan = self.policy.plan(start_frame=end_frame - num_kept, num_frames=num_kept)
        num_passing = (num_frames - num_kept) * tokens
        segments = tuple(
            replace(segment, source=segment.source + num_passing) for segment in plan.segments
        )
        window = replace(plan, segments=segments, num_passing=num_passing)
        return self._opened(window, start_frame)

    def _opened(self, window: WriteWindow, start_frame: int) -> WriteWindow:
        """Take room for a chunk from `start_frame` on, and expect its rows."""
        coming = self._coming(window, start_frame)
        self._check_view(window, coming)
        self.storage.open(slice(0, window.indices.local_end_index))
        self._verify_leaving(sorted(coming))
        for slot in coming:
            self._frame_at.pop(slot, None)
        self._spans.open(window)
        return window

    def _coming(self, window: WriteWindow, start_frame: int) -> dict[int, int]:
        """The latent frame that the chunk writes to each of its frame slots."""
        tokens, frames = self.spec.frame_tokens, {}
        for segment in window.segments:
            first_slot, first = segment.slot // tokens, start_frame + segment.source // tokens
            for number in range(segment.num_tokens // tokens):
                frames[first_slot + number] = first + number
        return frames

    def _check_view(self, window: WriteWindow, coming: Mapping[int, int]) -> None:
        """Biases and scores go by the frames that the policy names; rows, by where they lie.

        Raises:
            CacheError: it names another frame than what was written to a slot.
        """
        held = {**self._frame_at, **coming}
        for slot, frame in enumerate(window.frames_in_view):
            if held.get(slot) != frame:
                raise CacheError(
                    f"the window names latent frame {frame} in frame slot {slot}, and there lies "
                    f"{held.get(slot, 'none')}; a policy shows frames where it had them written"
                )

    def update(
        self,
        layer: int,
        window: WriteWindow,
        k_BTHD: Tensor,
        v_BTHD: Tensor,
        *,
        is_last: bool = True,
    ) -> tuple[Tensor, Tensor]:
        self._spans.opened()
        if k_BTHD.shape[1] != window.num_tokens:
            raise CacheError(
                f"got K/V of {k_BTHD.shape[1]} tokens, the window has {window.num_tokens}"
            )
        rows = self.storage.rows
        if self._is_exact or is_last:
            for segment in window.segments:
                new = (k_BTHD[:, segment.sources], v_BTHD[:, segment.sources])
                self._write(layer, segment.slots, new, is_final=is_last)
            self._spans.written.add(layer)
            self.counters.rows_written += window.num_tokens * self.spec.batch
        num_visible = window.indices.local_end_index
        place = self.storage.place(slice(0, num_visible))
        k, v = rows.read(layer, place)
        if not self._is_exact:
            for segment in window.segments:
                k[:, segment.slots] = k_BTHD[:, segment.sources]
                v[:, segment.slots] = v_BTHD[:, segment.sources]
        self.counters.rows_read += num_visible * self.spec.batch
        self.counters.gathers += isinstance(place, Tensor)
        return k, v

    def _write(
        self, layer: int, slots: slice, planes: Sequence[Tensor], *, is_final: bool = True
    ) -> None:
        stored = self.storage.rows.write(layer, self.storage.place(slots), planes)
        if is_final and self._ledger is not None:
            self._ledger.note(layer, slots, stored)

    def damaged(self, layers: range) -> list[tuple[int, int]]:
        found, self._left_damaged = self._left_damaged, []
        if not layers:
            return found
        # What was evicted a moment ago was attended to as well, and still lies there.
        return found + self._damaged_at(layers, sorted(self._frame_at))

    def _verify_leaving(self, frame_slots: Iterable[int]) -> None:
        """What is about to be overwritten was attended to until now; later nobody can tell."""
        layers = range(self.spec.num_layers)
        known = [slot for slot in frame_slots if slot in self._frame_at]
        self._left_damaged += self._damaged_at(layers, known)

    def _damaged_at(self, layers: range, frame_slots: Sequence[int]) -> list[tuple[int, int]]:
        """Layers and latent frames; slots that lie together are read in one go."""
        if self._ledger is None:
            return []
        found: list[tuple[int, int]] = []
        tokens = self.spec.frame_tokens
        for run in _runs(frame_slots):
            place = self.storage.place(slice(run.start * tokens, run.stop * tokens))
            damaged = self._ledger.damaged(layers, run, place)
            found += [(layer, self._frame_at[slot]) for layer, slot in damaged]
        return found

    def observe(self, layer: int, window: WriteWindow, q_BTHD: Tensor, k_BKHD: Tensor) -> None:
        self.policy.observe(q_BTHD, k_BKHD)

    def take_choices(self) -> list[Choice]:
        return [] if self._choosing is None else self._choosing.take_choices()

    def advance(self, window: WriteWindow) -> None:
        self._spans.opened()
        self._spans.check_written(range(self.spec.num_layers))
        num_before, before, spec = len(self.frames_kept), self.indices, self.spec
        self.policy.advance(window)
        self.indices = window.indices
        num_new = (window.indices.global_end_index - before.global_end_index) // spec.frame_tokens
        num_evicted = num_before + num_new - len(self.frames_kept)
        self.counters.advances += 1
        self.counters.rows_evicted += num_evicted * spec.frame_tokens * spec.num_layers * spec.batch
        self._spans.close()
        end_frame = window.indices.global_end_index // spec.frame_tokens
        first_frame = end_frame - window.num_tokens // spec.frame_tokens
        self._frame_at |= self._coming(window, first_frame)

    def reset(self) -> None:
        self._verify_leaving(sorted(self._frame_at))
        self._frame_at.clear()
        self._spans.reset()
        self.policy.reset()
        self.storage.clear()
        self.indices = self.spec.indices_at(0)

    def positions(self, window: WriteWindow | None = None) -> Tensor:
        """Position in the endless timeline, int64 `[1, K]`, of what `window` shows, or is cached.

        In slot order.
        """
        shown = self.frames_kept if window is None else window.frames_in_view
        frames = torch.tensor(shown, dtype=torch.int64, device=self.device)
        tokens = torch.arange(self.spec.frame_tokens, device=self.device)
        return (frames[:, None] * self.spec.frame_tokens + tokens).view(1, -1)

    def rows(self, layer: int, slots: slice) -> tuple[Tensor, Tensor]:
        k, v = self.storage.rows.read(layer, self.storage.place(slots))
        return k, v

    def cached(self, layer: int) -> tuple[Tensor, Tensor]:
        tokens = self.spec.frame_tokens
        slots = [slice(slot * tokens, (slot + 1) * tokens) for slot in self.policy.slots_kept]
        pieces = [self.storage.rows.read(layer, self.storage.place(at)) for at in slots]
        empty = self.storage.rows.read(layer, slice(0, 0))
        k, v = (torch.cat(planes, dim=1) for planes in zip(empty, *pieces, strict=True))
        return k, v

    def digest(self) -> str:
        positions = self.positions().expand(self.spec.batch, -1)
        layers = ((self.cached(layer), positions) for layer in range(self.spec.num_layers))
        rows = row_digest((self.indices.global_end_index,) * self.spec.batch, layers)
        if not self.scores_digest:
            return rows
        return hashlib.blake2b((rows + self.scores_digest).encode(), digest_size=16).hexdigest()


def _runs(numbers: Iterable[int]) -> Iterator[range]:
    """Ascending `numbers` as ranges without gaps."""
    run = range(0)
    for number in numbers:
        if run and number == run.stop:
            run = range(run.start, number + 1)
            continue
        if run:
            yield run
        run = range(number, number + 1)
    if run:
        yield run
