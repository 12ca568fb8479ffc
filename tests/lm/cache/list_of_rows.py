"""A plain list of rows, which every cache is compared with; not a test itself."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from scope_contracts.errors import CacheError
from scope_contracts.row_format import RowFormat
from scope_rt.kv_cache.codec import codec_for
from scope_rt.lm.cache.interface import KVCache
from scope_rt.tensors import TORCH_DTYPES
from tests.lm.cache.entries import BLOCK, CPU, ENTRIES, MAX_TOKENS, Entry

each_cache = pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES.keys())


def those(offer: Callable[[Entry], bool]) -> pytest.MarkDecorator:
    """Only the caches that offer something."""
    chosen = {name: entry for name, entry in ENTRIES.items() if offer(entry)}
    return pytest.mark.parametrize("entry", chosen.values(), ids=chosen.keys())


that_fork = those(lambda entry: entry.can_fork)
that_truncate = those(lambda entry: entry.can_truncate)
that_keep = those(lambda entry: entry.can_keep)
that_are_bounded = those(lambda entry: entry.is_bounded)
that_evict = those(lambda entry: entry.evicts)
Rows = dict[int, tuple[Tensor, ...]]
"""Position to planes `[heads, dim]`."""


@dataclass
class ListOfRows:
    """The reference: what is held, by layer, sequence and position."""

    format: RowFormat
    entry: Entry
    lengths: list[int] = field(init=False)
    held: dict[int, list[Rows]] = field(init=False)

    def __post_init__(self) -> None:
        self.lengths = [0] * self.entry.batch
        self.held = {layer: [{} for _ in self.lengths] for layer in self.entry.layers}

    def step(self, num_tokens: list[int], written: dict[int, tuple[Tensor, ...]]) -> None:
        codec, dtype = codec_for(self.format.codec, CPU), TORCH_DTYPES[self.format.dtype]
        for layer, planes in written.items():
            stored = [codec.decode(codec.encode(plane), dtype) for plane in planes]
            for sequence, new in enumerate(num_tokens):
                held, start = self.held[layer][sequence], self.lengths[sequence]
                for row in range(new):
                    held[start + row] = tuple(plane[sequence, row] for plane in stored)
                seen = self.entry.shows(start, start + new)
                self.held[layer][sequence] = {p: held[p] for p in held if p in seen}
        self.lengths = [old + new for old, new in zip(self.lengths, num_tokens, strict=True)]

    def can_truncate(self, lengths: list[int]) -> bool:
        """Whether all blocks are there that the window of the next token sees."""
        if self.entry.window is None:
            return True
        needed = [
            (sequence, position)
            for sequence, length in enumerate(lengths)
            for position in range(max(0, length - self.entry.window + 1), length)
        ]
        return all(
            position // BLOCK * BLOCK in rows_held[sequence]
            for rows_held in self.held.values()
            for sequence, position in needed
        )

    def truncate(self, lengths: list[int]) -> None:
        self.lengths = list(lengths)
        for sequences in self.held.values():
            for rows_held, length in zip(sequences, lengths, strict=True):
                for position in [p for p in rows_held if p >= length]:
                    del rows_held[position]

    def keep(self, layer: int, sequence: int, positions: set[int]) -> None:
        held = self.held[layer][sequence]
        self.held[layer][sequence] = {p: held[p] for p in held if p in positions}

    def fits(self, num_tokens: list[int]) -> bool:
        most = self.lengths
        if self.entry.can_keep:
            most = [max(len(self.held[i][b]) for i in self.held) for b in range(self.entry.batch)]
        fits = all(m + new <= MAX_TOKENS for m, new in zip(most, num_tokens, strict=True))
        return self.entry.evicts or not self.entry.is_bounded or fits

    def check(self, cache: KVCache) -> None:
        assert cache.lengths == tuple(self.lengths)
        for layer, sequences in self.held.items():
            planes, positions = cache.view(layer), cache.positions(layer)
            assert positions.shape == planes[0].shape[:2]
            for sequence, want in enumerate(sequences):
                shown = positions[sequence].tolist()
                assert sorted(p for p in shown if p >= 0) == sorted(want)
                for row, position in enumerate(shown):
                    for plane, value in zip(planes, want.get(position, ()), strict=position >= 0):
                        assert torch.equal(plane[sequence, row], value)


def write_span(
    cache: KVCache, entry: Entry, num_tokens: list[int], seed: int
) -> dict[int, tuple[Tensor, ...]]:
    """Write a span in all layers twice, as the calls of one chunk do; the second one counts."""
    cache.extend(num_tokens)
    for layer in entry.layers:
        cache.append(layer, *entry.rows(cache.format, max(num_tokens), seed + 1000))
    written = {
        layer: entry.rows(cache.format, max(num_tokens), seed + layer) for layer in entry.layers
    }
    for layer, planes in written.items():
        cache.append(layer, *planes)
    return written


def filled(entry: Entry, *spans: list[int]) -> tuple[KVCache, ListOfRows]:
    cache = entry.make()
    reference = ListOfRows(cache.format, entry)
    for number, span in enumerate(spans):
        reference.step(span, write_span(cache, entry, span, seed=10 * number))
        cache.advance()
    return cache, reference


def truncate_both(cache: KVCache, reference: ListOfRows, lengths: list[int]) -> None:
    if reference.can_truncate(lengths):
        cache.truncate(lengths)
        reference.truncate(lengths)
    else:
        with pytest.raises(CacheError, match="have left it"):
            cache.truncate(lengths)
