"""Rows lie in blocks wherever the pool had one, and what is read is what a contiguous cache reads.

A `PagedCache` is a batch of sequences over a `PagedStore`; sequences join and leave batches at no
cost, for the rows stay where they are. What a speculative span would overwrite is copied first, so
`discard` only takes old tables back.

Adjacent blocks of a single sequence, and kernels that take a block table (`pages`), read in place.
Everything else is gathered, and `counters.gathers` counts it.
"""

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from scope_contracts.errors import CacheError, UnsupportedError
from scope_contracts.row_format import CodecKind, RowFormat
from scope_rt.kv_cache.row_digest import row_digest
from scope_rt.kv_cache.span import SpanState
from scope_rt.lm.cache.layer_map import AttnLayerMap
from scope_rt.lm.cache.paged_rows import Pages, VisibleRows, padded_table, span_slots
from scope_rt.lm.cache.paged_store import PagedSequence, PagedStore
from scope_rt.lm.cache.prefix_cache import Table


class PagedCache:
    """`len(sequences)` sequences of a store. It frees them at `reset`; whoever made them may too.

    `layer` means the model's own layer number in every call.

    Raises `CacheError` for a batch of nothing, and for one that has a sequence twice.
    """

    def __init__(self, store: PagedStore, sequences: Sequence[PagedSequence]) -> None:
        if not sequences or len(set(map(id, sequences))) < len(sequences):
            raise CacheError(
                f"got a batch of {len(sequences)} sequences, want at least 1, and each once; "
                "start another from a prefix match to share rows"
            )
        self.store, self.sequences = store, list(sequences)
        self.counters = store.counters
        self._spans: SpanState[tuple[int, ...], list[PagedSequence]] = SpanState()
        self._targets: list[tuple[Tensor, Tensor | None]] = []
        self._rows: dict[tuple[int, bool], VisibleRows] = {}

    @classmethod
    def allocate(
        cls,
        row_format: RowFormat,
        *,
        layers: AttnLayerMap,
        batch: int,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        max_tokens: int | None = None,
        windows: Sequence[int | None] | None = None,
    ) -> "PagedCache":
        """A batch of empty sequences with a store of its own; errors as `PagedStore`."""
        store = PagedStore(
            row_format,
            layers=layers,
            num_blocks=num_blocks,
            block_size=block_size,
            device=device,
            max_tokens=max_tokens,
            windows=windows,
        )
        return cls(store, [store.start() for _ in range(batch)])

    @property
    def format(self) -> RowFormat:
        return self.store.rows.format

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(sequence.length for sequence in self.sequences)

    @property
    def num_bytes(self) -> int:
        """Of the whole pool, which other caches may share."""
        return self.store.rows.num_bytes

    def extend(self, num_tokens: Sequence[int]) -> None:
        batch = len(self.sequences)
        if len(num_tokens) != batch or min(num_tokens) < 0:
            raise CacheError(f"extend: got {tuple(num_tokens)}, want {batch} counts from 0 on")
        limit = self.store.max_tokens
        for index, (length, new) in enumerate(zip(self.lengths, num_tokens, strict=True)):
            if limit is not None and length + new > limit:
                raise CacheError(
                    f"sequence {index}: {length} tokens and {new} new ones do not fit {limit}; "
                    "raise max_tokens, or truncate"
                )
        pairs = zip(self.sequences, num_tokens, strict=True)
        growths = [self.store.plan_growth(sequence, new) for sequence, new in pairs]
        if not self.store.fits(growths):
            pool, wanted = self.store.pool, sum(growth.num_new for growth in growths)
            raise CacheError(
                f"no room for {wanted} more blocks: {pool.num_free} of {pool.num_blocks} are free; "
                "end a sequence, or raise the cache's byte budget"
            )
        self.store.grow(self.sequences, growths)
        self._moved()
        self._spans.open(tuple(num_tokens))
        self._targets = [self._targets_of(group) for group in range(len(self.store.groups))]

    def append(self, layer: int, *planes: Tensor) -> None:
        (group, place), span = self.store.locate(layer), self._spans.opened()
        want = (len(span), max(span))
        for plane in planes:
            if plane.shape[:2] != want:
                raise CacheError(f"got rows {tuple(plane.shape)}, the open span is {want}")
        slots, sources = self._targets[group]
        flat = [plane.flatten(0, 1) for plane in planes]
        self.store.rows.write(
            place, slots, flat if sources is None else [x[sources] for x in flat], batch=0
        )
        self._spans.written.add(layer)
        self.counters.rows_written += sum(span)

    def view(self, layer: int) -> tuple[Tensor, ...]:
        group, place = self.store.locate(layer)
        rows = self._shown(group, layer in self._spans.written)
        self.counters.rows_read += rows.num_rows
        self.counters.gathers += not isinstance(rows.slots, slice)
        return self._read(place, rows)

    def rows_held(self, layer: int) -> tuple[int, ...]:
        """Rows of every sequence without the open span, from what the host knows."""
        return self._shown(self.store.locate(layer)[0], with_span=False).counts

    def hold_same_positions(self, layers: Sequence[int]) -> bool:
        """Whether layers that hold equally many rows hold those of the same positions.

        They do: rows leave from the front only, where a window ends.
        """
        return True

    def positions(self, layer: int) -> Tensor:
        group, _ = self.store.locate(layer)
        return self._shown(group, layer in self._spans.written).positions

    def pages(self, layer: int) -> Pages:
        """All of the layer for a kernel that reads blocks in place: no row is copied.

        Such kernels run on a GPU, so this is reached from there only; models that transformers
        brings read `view`.

        Raises:
            UserInputError: the store's kernel does not read blocks of this size in place.
            UnsupportedError: rows are encoded, which no such kernel reads.
        """
        self.store.page_support.require(self.store.block_size)
        if self.format.codec is not CodecKind.IDENTITY:
            raise UnsupportedError(
                f"no kernel reads {self.format.codec} rows in place; call view, which decodes"
            )
        group, place = self.store.locate(layer)
        visible = self._visible(layer in self._spans.written)
        self.counters.rows_read += sum(visible)
        store, size = self.store, self.store.block_size
        return Pages(
            planes=tuple(
                parts[0][place, 0].unflatten(0, (store.zero_block + 1, size))
                for parts in store.rows.parts
            ),
            block_table=self.block_table(group),
            cache_seqlens=torch.tensor(visible, dtype=torch.int32, device=store.rows.device),
        )

    def block_table(self, group: int = 0) -> Tensor:
        """int32 `[B, blocks]` of one group of layers; the zero block where there is none."""
        return padded_table(
            self._tables(group), zero_block=self.store.zero_block, device=self.store.rows.device
        )

    def advance(self) -> None:
        span = self._spans.opened()
        self._spans.check_written(self.store.layers.attention_layers)
        for sequence, new in zip(self.sequences, span, strict=True):
            sequence.length += new
        self.counters.advances += 1
        self._moved()

    def keep(self, layer: int, rows_BK: Tensor) -> NoReturn:
        raise UnsupportedError(
            "a block holds several layers, so rows cannot leave one of them; use a contiguous "
            "cache to evict, or give the layers a window"
        )

    def truncate(self, lengths: Sequence[int]) -> None:
        self._spans.check_closed("truncate")
        falling = zip(lengths, self.lengths, strict=False)
        if len(lengths) != len(self.sequences) or any(not 0 <= a <= b for a, b in falling):
            raise CacheError(
                f"truncate: got {tuple(lengths)}, want {len(self.sequences)} lengths of at most "
                f"{self.lengths}"
            )
        for sequence, length in zip(self.sequences, lengths, strict=True):
            self._check_window(sequence, length)
        for sequence, length in zip(self.sequences, lengths, strict=True):
            end = -(-length // self.store.block_size)
            surplus = PagedSequence([table[end:] for table in sequence.tables])
            self.store.pool.free(surplus.blocks)
            for table in sequence.tables:
                del table[end:]
            sequence.length = length
            del sequence.keys[length // self.store.block_size :]
        self._moved()

    def fork(self) -> None:
        self._spans.fork(self._shared)

    def commit(self) -> None:
        for before in self._spans.commit():
            self.store.end(before)

    def discard(self) -> None:
        for sequence, before in zip(self.sequences, self._spans.discard(), strict=True):
            self.store.end(sequence)
            sequence.become(before)
        self._moved()

    def reset(self) -> None:
        for sequence in [*self.sequences, *(self._spans.marks or ())]:
            self.store.end(sequence)
        self._spans.reset()
        self._moved()

    def digest(self) -> str:
        """As the interface says; neither the open span counts nor rows no later query can see."""
        layers = (self.store.locate(layer) for layer in self.store.layers.attention_layers)
        shown = ((group, place, self._rows_of(group, self.lengths)) for group, place in layers)
        return row_digest(
            self.lengths,
            (
                (self._read(place, rows), self._needed(group, rows.positions))
                for group, place, rows in shown
            ),
        )

    def _needed(self, group: int, positions_BK: Tensor) -> Tensor:
        """The positions that a later query can see; -1 in place of the others."""
        window = self.store.groups[group].window
        if window is None:
            return positions_BK
        firsts = [length - window + 1 for length in self.lengths]
        return positions_BK.where(
            positions_BK >= torch.tensor(firsts, device=positions_BK.device)[:, None], -1
        )

    def _shared(self) -> list[PagedSequence]:
        """Copies that hold every block, but none behind the last row: a span that failed may have
        left one, which would be written where it is shared."""
        self.truncate(self.lengths)
        copies = [sequence.copy() for sequence in self.sequences]
        self.store.pool.hold(block for sequence in copies for block in sequence.blocks)
        return copies

    def _check_window(self, sequence: PagedSequence, length: int) -> None:
        """Refuse to go back to where the next query would need rows that left the window."""
        size, prefixes = self.store.block_size, self.store.prefixes
        for group, table in zip(self.store.groups, sequence.tables, strict=True):
            first = prefixes.first_needed(length, group.window)
            if None in table[first : -(-length // size)]:
                raise CacheError(
                    f"truncate to {length}: rows that the window of {group.window} needs there "
                    "have left it; fork before speculating, or start the sequence again"
                )

    def _moved(self) -> None:
        """Rows, lengths or tables are not what they were: close the span, forget what was shown."""
        self._spans.close()
        self._rows.clear()

    def _visible(self, with_span: bool) -> tuple[int, ...]:
        if not with_span:
            return self.lengths
        return tuple(a + b for a, b in zip(self.lengths, self._spans.opened(), strict=True))

    def _shown(self, group: int, with_span: bool) -> VisibleRows:
        if (group, with_span) not in self._rows:
            self._rows[group, with_span] = self._rows_of(group, self._visible(with_span))
        return self._rows[group, with_span]

    def _rows_of(self, group: int, visible: Sequence[int]) -> VisibleRows:
        return VisibleRows(
            self._tables(group),
            visible,
            block_size=self.store.block_size,
            zero_block=self.store.zero_block,
            device=self.store.rows.device,
        )

    def _targets_of(self, group: int) -> tuple[Tensor, Tensor | None]:
        return span_slots(
            self._tables(group),
            self.lengths,
            self._spans.opened(),
            block_size=self.store.block_size,
            device=self.store.rows.device,
        )

    def _tables(self, group: int) -> list[Table]:
        return [sequence.tables[group] for sequence in self.sequences]

    def _read(self, place: int, rows: VisibleRows) -> tuple[Tensor, ...]:
        slots = rows.slots
        if isinstance(slots, slice):
            return self.store.rows.read(place, slots)
        read = self.store.rows.read(place, slots.flatten(), batch=0)
        return tuple(plane.unflatten(0, slots.shape) for plane in read)
