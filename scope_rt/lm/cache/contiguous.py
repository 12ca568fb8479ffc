"""Every sequence's rows lie in one piece from row 0 on, so attention reads them without a copy.

`[layers that attend, batch, max_tokens, heads, width]`, allocated once. Time comes before heads, as
flash-attn's `flash_attn_with_kvcache` takes it. That kernel may write K/V itself, but it does not
count: lengths move once, at `advance`, after the last layer.

A latent (MLA) cache and an indexer's key cache are this class with another `RowFormat`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scope_contracts.errors import CacheError, UnsupportedError, mismatch
from scope_contracts.row_format import CodecKind, RowFormat
from scope_rt.kv_cache.counters import CacheCounters
from scope_rt.kv_cache.row_digest import row_digest
from scope_rt.kv_cache.row_store import RowStore
from scope_rt.kv_cache.span import SpanState
from scope_rt.lm.cache.layer_map import AttnLayerMap


@dataclass(slots=True)
class _Marks:
    """Where every sequence stands: all of the state that is not rows."""

    lengths: list[int]
    """Tokens advanced by, per sequence."""
    rows: list[list[int]]
    """Rows held, per layer slot and sequence: `lengths`, less what was evicted."""
    kept: dict[int, Tensor]
    """Positions `[B, K]` of the rows that survived the last eviction of a layer slot, -1 for none.

    Rows behind them continue without a gap up to the sequence's length.
    """

    def copy(self) -> "_Marks":
        return _Marks(list(self.lengths), [list(rows) for rows in self.rows], dict(self.kept))


class ContiguousCache:
    """A batch of `batch` sequences, each up to `max_tokens` rows in every layer of `layers`.

    `row_format` is this rank's share. `layer` means the model's own layer number in every call.
    Raises `CacheError` for a size below 1.
    """

    def __init__(
        self,
        row_format: RowFormat,
        *,
        layers: AttnLayerMap,
        batch: int,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        if batch < 1 or max_tokens < 1:
            got = (batch, max_tokens)
            raise CacheError(mismatch("batch and max_tokens", got=got, want="at least 1"))
        self.layers, self.batch, self.max_tokens = layers, batch, max_tokens
        self.store = RowStore(
            row_format,
            num_layers=layers.num_slots,
            batch=batch,
            num_slots=max_tokens,
            device=device,
        )
        self.counters = CacheCounters()
        self.seqlens = torch.zeros((layers.num_slots, batch), dtype=torch.int32, device=device)
        self._marks = self._empty()
        self._spans: SpanState[tuple[int, ...], _Marks] = SpanState()
        self._overwritten: list[list[Tensor]] | None = None

    @property
    def format(self) -> RowFormat:
        return self.store.format

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self._marks.lengths)

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows; `saved_bytes` come on top."""
        return self.store.num_bytes

    @property
    def saved_bytes(self) -> int:
        """Bytes that an open fork holds, so that a discard can bring overwritten rows back."""
        return sum(part.nbytes for plane in self._overwritten or () for part in plane)

    def cache_seqlens(self, layer: int) -> Tensor:
        """Rows a layer holds of every sequence, without the open span: int32 `[B]`, on the device.

        flash-attn's argument of that name.
        """
        return self.seqlens[self.layers.slot(layer)]

    def extend(self, num_tokens: Sequence[int]) -> None:
        if len(num_tokens) != self.batch or min(num_tokens) < 0:
            raise CacheError(f"extend: got {tuple(num_tokens)}, want {self.batch} counts from 0 on")
        for sequence, new in enumerate(num_tokens):
            held = max(rows[sequence] for rows in self._marks.rows)
            if held + new > self.max_tokens:
                raise CacheError(
                    f"sequence {sequence}: {held} rows and {new} new ones do not fit "
                    f"{self.max_tokens}; raise max_tokens, evict, or truncate"
                )
        self._spans.open(tuple(num_tokens))

    def append(self, layer: int, *planes: Tensor) -> None:
        slot, span = self.layers.slot(layer), self._spans.opened()
        want = (self.batch, max(span))
        for plane in planes:
            if plane.shape[:2] != want:
                raise CacheError(f"got rows {tuple(plane.shape)}, the open span is {want}")
        starts = self._marks.rows[slot]
        if len(set(starts)) == len(set(span)) == 1:
            self.store.write(slot, slice(starts[0], starts[0] + span[0]), planes)
        else:
            for sequence, (start, new) in enumerate(zip(starts, span, strict=True)):
                rows = [plane[sequence, :new] for plane in planes]
                self.store.write(slot, slice(start, start + new), rows, batch=sequence)
        self._count_written(layer)

    def memory(self, layer: int) -> tuple[Tensor, ...]:
        """A layer's whole memory, `[B, max_tokens, heads, dim]` a plane, for a kernel that writes
        the span's rows itself, behind `cache_seqlens`; then call `wrote_in_place`.

        Such kernels run on a GPU, so this is reached from there only; models that transformers
        brings call `append`.

        Raises:
            UnsupportedError: rows are encoded.
        """
        if self.format.codec is not CodecKind.IDENTITY:
            raise UnsupportedError(
                f"no kernel writes {self.format.codec} rows; use append, which encodes"
            )
        slot = self.layers.slot(layer)
        return tuple(part[slot] for (part,) in self.store.parts)

    def wrote_in_place(self, layer: int) -> None:
        """A kernel wrote the span's rows of `layer` into `memory`: as if they were appended."""
        self.layers.slot(layer)  # refuses a layer that has none
        self._count_written(layer)

    def view(self, layer: int) -> tuple[Tensor, ...]:
        slot = self.layers.slot(layer)
        visible = self._visible(layer)
        self.counters.rows_read += sum(visible)
        return self.store.read(slot, slice(0, max(visible)))

    def rows_held(self, layer: int) -> tuple[int, ...]:
        """Rows of every sequence without the open span, from what the host knows."""
        return tuple(self._marks.rows[self.layers.slot(layer)])

    def hold_same_positions(self, layers: Sequence[int]) -> bool:
        """Whether layers that hold equally many rows hold those of the same positions.

        The device is waited for once, and only if rows were evicted from one of them.
        """
        slots = [self.layers.slot(layer) for layer in layers]
        if self._marks.kept.keys().isdisjoint(slots):
            return True
        first, *others = (self._positions(slot, self._marks.rows[slot]) for slot in slots)
        return not others or bool((torch.stack(others) == first).all())

    def positions(self, layer: int) -> Tensor:
        return self._positions(self.layers.slot(layer), self._visible(layer))

    def advance(self) -> None:
        span = self._spans.opened()
        self._spans.check_written(self.layers.attention_layers)
        for rows in (self._marks.lengths, *self._marks.rows):
            rows[:] = [row + new for row, new in zip(rows, span, strict=True)]
        self.seqlens += torch.tensor(span, dtype=torch.int32, device=self.seqlens.device)
        self.counters.advances += 1
        self._spans.close()

    def keep(self, layer: int, rows_BK: Tensor) -> None:
        """As the interface says; -1 in `rows_BK` stands for no row, where sequences keep less.

        The device is waited for once, whatever the batch.
        """
        slot = self.layers.slot(layer)
        self._spans.check_closed("keep")
        held = self._marks.rows[slot]
        if rows_BK.ndim != 2 or len(rows_BK) != self.batch or rows_BK.is_floating_point():
            got = f"{tuple(rows_BK.shape)} of {rows_BK.dtype}"
            raise CacheError(f"keep: got rows {got}, want [{self.batch}, K] of integers")
        chosen_BK, counts = self._chosen(rows_BK.to(self.store.device), held)
        self._save_before_overwriting()
        is_row_BK = chosen_BK >= 0
        positions_BK = torch.nn.functional.pad(self._positions(slot, held), (0, 1))  # never empty
        kept_BK = positions_BK.gather(1, chosen_BK.clamp(min=0)).where(is_row_BK, -1)
        for sequence, count in enumerate(counts):
            rows = chosen_BK[sequence, :count]
            self.store.copy(slot, source=rows, target=slice(0, count), batch=sequence)
            self.counters.rows_evicted += held[sequence] - count
        held[:] = counts
        self._marks.kept[slot] = kept_BK
        self._publish()

    def truncate(self, lengths: Sequence[int]) -> None:
        self._spans.check_closed("truncate")
        marks, before = self._marks, self._spans.marks
        falling = zip(lengths, marks.lengths, strict=False)
        if len(lengths) != self.batch or any(not 0 <= new <= old for new, old in falling):
            raise CacheError(
                f"truncate: got {tuple(lengths)}, want {self.batch} lengths of at most "
                f"{self.lengths}"
            )
        if before is not None and any(map(int.__lt__, lengths, before.lengths)):
            self._save_before_overwriting()
        limits = torch.tensor(lengths, device=self.store.device)[:, None]
        for slot, rows in enumerate(marks.rows):
            if slot not in marks.kept:
                rows[:] = lengths
                continue
            positions_BK = self._positions(slot, rows)
            rows[:] = ((positions_BK >= 0) & (positions_BK < limits)).sum(1).tolist()
            marks.kept[slot] = marks.kept[slot].where(marks.kept[slot] < limits, -1)
        marks.lengths[:] = lengths
        self._publish()

    def fork(self) -> None:
        self._spans.fork(self._marks.copy)

    def commit(self) -> None:
        self._spans.commit()
        self._overwritten = None

    def discard(self) -> None:
        """As the interface says. Rows are only copied back if the span evicted or truncated."""
        self._marks = self._spans.discard()
        if self._overwritten is not None:
            for plane, saved in zip(self.store.parts, self._overwritten, strict=True):
                for part, old in zip(plane, saved, strict=True):
                    part.copy_(old)
        self._overwritten = None
        self._publish()

    def reset(self) -> None:
        self._marks, self._overwritten = self._empty(), None
        self._spans.reset()
        self._publish()

    def digest(self) -> str:
        """As the interface says; the open span does not count."""
        held = self._marks.rows
        layers = (
            (self.store.read(slot, slice(0, max(rows))), self._positions(slot, rows))
            for slot, rows in enumerate(held)
        )
        return row_digest(self.lengths, layers)

    def _empty(self) -> _Marks:
        rows = [[0] * self.batch for _ in range(self.layers.num_slots)]
        return _Marks([0] * self.batch, rows, {})

    def _count_written(self, layer: int) -> None:
        self.counters.rows_written += sum(self._spans.opened())
        self._spans.written.add(layer)

    def _visible(self, layer: int) -> list[int]:
        held = self._marks.rows[self.layers.slot(layer)]
        if layer not in self._spans.written:
            return held
        return [rows + new for rows, new in zip(held, self._spans.opened(), strict=True)]

    def _positions(self, slot: int, visible: Sequence[int]) -> Tensor:
        """int64 `[B, max(visible)]` of a slot's first rows; -1 behind a sequence's `visible`."""
        device, held = self.store.device, self._marks.rows[slot]
        row = torch.arange(max(visible), device=device)
        evicted = [len_ - rows for len_, rows in zip(self._marks.lengths, held, strict=True)]
        positions = row + torch.tensor(evicted, device=device)[:, None]
        if slot in self._marks.kept:
            kept = self._marks.kept[slot][:, : row.numel()]
            head = positions[:, : kept.shape[1]]
            head.copy_(kept.where(kept >= 0, head))
        return positions.where(row < torch.tensor(visible, device=device)[:, None], -1)

    def _chosen(self, rows_BK: Tensor, held: Sequence[int]) -> tuple[Tensor, list[int]]:
        """The rows to keep, ascending, so that positions stay in order, then -1; and their counts.

        Raises:
            CacheError: a row is not there, or there twice.
        """
        none = torch.iinfo(torch.int64).max
        sorted_BK = rows_BK.long().where(rows_BK >= 0, none).sort(1).values
        is_row_BK = sorted_BK < none
        is_wrong_BK = is_row_BK & (sorted_BK >= torch.tensor(held, device=rows_BK.device)[:, None])
        is_wrong_BK[:, 1:] |= is_row_BK[:, 1:] & (sorted_BK[:, 1:] == sorted_BK[:, :-1])
        counts, wrong = torch.stack([is_row_BK.sum(1), is_wrong_BK.sum(1)]).tolist()
        for rows, limit, is_wrong in zip(rows_BK, held, wrong, strict=True):
            if is_wrong:
                got = rows.tolist()
                raise CacheError(f"keep: got rows {got}, want different ones below {limit}")
        return sorted_BK.where(is_row_BK, -1), counts

    def _save_before_overwriting(self) -> None:
        """Rows from before a fork are about to move or to be written over: copy them all, once."""
        if self._spans.marks is not None and self._overwritten is None:
            self._overwritten = [[part.clone() for part in plane] for plane in self.store.parts]

    def _publish(self) -> None:
        self.seqlens.copy_(torch.tensor(self._marks.rows, dtype=torch.int32))
