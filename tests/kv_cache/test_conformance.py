"""Every cache does to its rows what a plain list of rows would, whatever the order of calls."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scope_contracts.errors import CacheError, UnsupportedError
from scope_contracts.row_format import RowFormat
from scope_rt.kv_cache.codec import codec_for
from scope_rt.kv_cache.interface import KVCache
from scope_rt.tensors import TORCH_DTYPES
from tests.kv_cache.entries import BLOCK, CPU, ENTRIES, MAX_TOKENS, Entry

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


@each_cache
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_any_order_of_calls_leaves_what_a_list_of_rows_would(
    entry: Entry, data: st.DataObject
) -> None:
    cache = entry.make()
    reference, before = ListOfRows(cache.format, entry), None
    names = ["step", "step", "step", "keep", "truncate", "fork", "commit", "discard", "reset"]
    least = 1 if entry.evicts else 0
    for seed in range(data.draw(st.integers(1, 9))):
        call = data.draw(st.sampled_from(names))
        match call:
            case "step":
                drawn = data.draw(st.lists(st.integers(least, 4), min_size=3, max_size=3))
                span = entry.span(*drawn)
                if reference.fits(span):
                    reference.step(span, write_span(cache, entry, span, 100 * seed))
                    cache.advance()
                else:
                    with pytest.raises(CacheError):
                        cache.extend(span)
            case "keep" if entry.can_keep:
                keep_some(cache, reference, data.draw(st.sampled_from(entry.layers)), data)
            case "truncate" if entry.can_truncate:
                lengths = [data.draw(st.integers(0, length)) for length in reference.lengths]
                truncate_both(cache, reference, lengths)
            case "fork" if entry.can_fork and before is None:
                before = copy.deepcopy(reference)
                cache.fork()
            case "commit" if before is not None:
                before = None
                cache.commit()
            case "discard" if before is not None:
                reference, before = before, None
                cache.discard()
            case "reset":
                reference, before = ListOfRows(cache.format, entry), None
                cache.reset()
        reference.check(cache)


def truncate_both(cache: KVCache, reference: ListOfRows, lengths: list[int]) -> None:
    if reference.can_truncate(lengths):
        cache.truncate(lengths)
        reference.truncate(lengths)
    else:
        with pytest.raises(CacheError, match="have left it"):
            cache.truncate(lengths)


def keep_some(cache: KVCache, reference: ListOfRows, layer: int, data: st.DataObject) -> None:
    shown = cache.positions(layer).tolist()
    chosen = []
    for sequence, line in enumerate(shown):
        real = [row for row, position in enumerate(line) if position >= 0]
        rows = data.draw(st.lists(st.sampled_from(real), unique=True)) if real else []
        reference.keep(layer, sequence, {line[row] for row in rows})
        chosen.append(rows)
    width = max(map(len, chosen))
    cache.keep(layer, torch.tensor([rows + [-1] * (width - len(rows)) for rows in chosen]).long())


@each_cache
def test_the_open_span_is_visible_and_counts_after_advance_only(entry: Entry) -> None:
    first, span = entry.span(2, 1, 2), entry.span(1, 2, 1)
    cache, reference = filled(entry, first)
    digest = cache.digest()
    written = write_span(cache, entry, span, seed=7)
    assert cache.lengths == tuple(first)
    assert cache.digest() == digest
    shown = [entry.shows(old, old + new) for old, new in zip(first, span, strict=True)]
    for layer in entry.layers:
        for sequence, want in zip(cache.positions(layer).tolist(), shown, strict=True):
            assert {p for p in sequence if p >= 0} == want
        assert cache.view(layer)[0].shape[1] == max(map(len, shown))
    cache.advance()
    reference.step(span, written)
    reference.check(cache)


@each_cache
def test_a_cache_shows_what_it_should_while_it_fills_to_its_end_and_is_cut_back(
    entry: Entry,
) -> None:
    cache = entry.make()
    reference = ListOfRows(cache.format, entry)
    for seed, span in enumerate((entry.span(4, 3, 4), entry.span(4, 4, 2), entry.span(4, 4, 4))):
        reference.step(span, write_span(cache, entry, span, seed=10 * seed))
        cache.advance()
        reference.check(cache)
    for length in reversed(range(min(reference.lengths)) if entry.can_truncate else ()):
        truncate_both(cache, reference, [length] * entry.batch)
        reference.check(cache)


@each_cache
def test_a_span_opened_anew_replaces_the_one_before_it(entry: Entry) -> None:
    cache, reference = filled(entry, entry.span(2, 1, 2))
    write_span(cache, entry, entry.span(4, 4, 4), seed=7)
    span = entry.span(1, 0, 2)
    reference.step(span, write_span(cache, entry, span, seed=9))
    cache.advance()
    reference.check(cache)


@that_are_bounded
def test_what_does_not_fit_is_refused_before_anything_changes(entry: Entry) -> None:
    cache, reference = filled(entry, entry.span(4, 4, 4), entry.span(4, 2, 4))
    digest, counters = cache.digest(), copy.copy(cache.counters)
    with pytest.raises(CacheError, match=r"not fit|no room"):
        cache.extend([MAX_TOKENS] * entry.batch)
    assert (cache.digest(), cache.counters) == (digest, counters)
    span = entry.span(1, 1, 1)
    reference.step(span, write_span(cache, entry, span, seed=5))
    cache.advance()
    reference.check(cache)


@each_cache
def test_calls_out_of_order_are_refused(entry: Entry) -> None:
    cache, reference = filled(entry, entry.span(2, 2, 2))
    for call in (cache.advance, cache.commit, cache.discard):
        with pytest.raises(CacheError):
            call()
    cache.extend(entry.span(1, 1, 1))
    with pytest.raises(CacheError, match=r"got no (rows|state)"):
        cache.advance()
    if entry.can_truncate:
        with pytest.raises(CacheError):
            cache.truncate([0] * entry.batch)
    if entry.can_fork:
        for call in (cache.fork, cache.commit):
            with pytest.raises(CacheError):
                call()
    reference.check(cache)


@each_cache
def test_rows_of_another_shape_are_refused_and_nothing_is_written(entry: Entry) -> None:
    cache, reference = filled(entry, entry.span(2, 2, 2))
    span = entry.span(1, 1, 1)
    cache.extend(span)
    good = entry.rows(cache.format, span[0], seed=1)
    bad = [(), (*good[:-1], good[-1][..., :-1]), tuple(plane[:, :0] for plane in good)]
    for planes in bad:
        with pytest.raises(CacheError):
            cache.append(entry.layers[0], *planes)
    reference.step(span, write_span(cache, entry, span, seed=5))
    cache.advance()
    reference.check(cache)


@that_are_bounded
def test_counters_are_exact(entry: Entry) -> None:
    spans = entry.span(2, 1, 2), entry.span(1, 1, 0)
    cache, _ = filled(entry, *spans)
    held = sum(map(sum, spans))
    written = 2 * held * len(entry.layers)
    assert (cache.counters.rows_written, cache.counters.advances) == (written, 2)
    before = cache.counters.rows_read
    cache.digest()
    assert cache.counters.rows_read == before
    cache.view(entry.layers[0])
    assert cache.counters.rows_read - before == (0 if entry.evicts else held)
    if entry.can_keep:
        cache.keep(entry.layers[0], torch.zeros(entry.batch, 1, dtype=torch.int64))
        assert cache.counters.rows_evicted == held - entry.batch
    cache.reset()
    assert cache.counters.advances == 2


@that_evict
def test_what_a_cache_evicts_by_itself_it_counts(entry: Entry) -> None:
    span = entry.span(4, 4, 4)
    cache, reference = filled(entry, *[span] * (16 // span[0]))
    reference.check(cache)
    evicted = 16 - len(entry.shows(16 - span[0], 16)) + entry.summaries_evicted
    assert cache.counters.rows_evicted == evicted * entry.batch * len(entry.layers)


@that_fork
def test_a_discarded_span_leaves_the_digest_and_a_committed_one_is_straight_decode(
    entry: Entry,
) -> None:
    first, second = entry.span(2, 1, 2), entry.span(1, 3, 1)
    straight, _ = filled(entry, first, second)
    cache, _ = filled(entry, first)
    digest = cache.digest()
    cache.fork()
    write_span(cache, entry, second, seed=77)
    cache.advance()
    assert cache.digest() != digest
    if entry.can_truncate:
        cache.truncate([1] * entry.batch)
    write_span(cache, entry, second, seed=78)
    cache.discard()
    assert cache.digest() == digest
    cache.fork()
    write_span(cache, entry, second, seed=10)
    cache.advance()
    cache.commit()
    assert cache.digest() == straight.digest()


@that_keep
def test_what_was_evicted_in_a_discarded_span_is_there_again(entry: Entry) -> None:
    cache, reference = filled(entry, entry.span(6, 5, 6))
    digest = cache.digest()
    cache.fork()
    for layer in entry.layers:
        cache.keep(layer, torch.tensor([[1, 4]] * entry.batch))
    write_span(cache, entry, entry.span(3, 3, 3), seed=7)
    cache.advance()
    cache.discard()
    assert cache.digest() == digest
    reference.check(cache)


@that_keep
def test_rows_written_after_an_eviction_and_a_truncation_have_their_own_positions(
    entry: Entry,
) -> None:
    cache, reference = filled(entry, entry.span(8, 8, 8))
    for layer in entry.layers:
        cache.keep(layer, torch.tensor([[7, 0, 6], [2, 7, 0], [-1, 3, 1]][: entry.batch]))
        for sequence, kept in enumerate([{0, 6, 7}, {0, 2, 7}, {1, 3}][: entry.batch]):
            reference.keep(layer, sequence, kept)
    reference.check(cache)
    cache.truncate([5] * entry.batch)
    reference.truncate([5] * entry.batch)
    span = entry.span(2, 1, 2)
    reference.step(span, write_span(cache, entry, span, seed=7))
    cache.advance()
    reference.check(cache)


@that_fork
def test_one_speculative_span_at_a_time(entry: Entry) -> None:
    cache, _ = filled(entry, entry.span(2, 2, 2))
    cache.fork()
    with pytest.raises(CacheError, match="commit or discard"):
        cache.fork()
    cache.commit()
    with pytest.raises(CacheError, match="fork first"):
        cache.commit()


@that_truncate
def test_truncate_goes_back_only(entry: Entry) -> None:
    cache, reference = filled(entry, entry.span(2, 2, 2))
    for lengths in ([3] * entry.batch, [-1] * entry.batch, [1] * (entry.batch + 1)):
        with pytest.raises(CacheError, match="truncate"):
            cache.truncate(lengths)
    reference.check(cache)


@each_cache
def test_the_digest_sees_one_changed_sign_and_a_swap_of_two_rows(entry: Entry) -> None:
    digests = set()
    for change in ("none", "sign", "swap"):
        cache = entry.make()
        cache.extend(entry.span(2, 2, 2))
        for layer in entry.layers:
            planes = [plane.clone() for plane in entry.rows(cache.format, 2, seed=layer)]
            if change == "sign":
                planes[0][0, -1, 0, 0] *= -1
            if change == "swap":
                planes = [plane.flip(1) for plane in planes]
            cache.append(layer, *planes)
        cache.advance()
        digests.add(cache.digest())
    assert len(digests) == 3


@that_keep
def test_the_digest_sees_at_which_position_a_row_is(entry: Entry) -> None:
    digests = set()
    for row in (0, 1):
        cache = entry.make()
        cache.extend([2] * entry.batch)
        for layer in entry.layers:
            cache.append(layer, *(x.repeat(1, 2, 1, 1) for x in entry.rows(cache.format, 1, 3)))
        cache.advance()
        for layer in entry.layers:
            cache.keep(layer, torch.tensor([[row]] * entry.batch))
        digests.add(cache.digest())
    assert len(digests) == 2


def test_equal_rows_give_equal_digests_in_every_storage() -> None:
    for names in (("contiguous identity", "paged"), ("contiguous int8", "paged int8")):
        digests = set()
        for name in names:
            entry = ENTRIES[name]
            cache, _ = filled(entry, entry.span(3, 1, 4), entry.span(2, 4, 1))
            digests.add(cache.digest())
        assert len(digests) == 1


@each_cache
def test_reset_forgets_all_and_the_memory_stays(entry: Entry) -> None:
    fresh, _ = filled(entry, entry.span(2, 1, 2))
    cache, _ = filled(entry, entry.span(3, 3, 3), entry.span(2, 2, 2))
    num_bytes = cache.num_bytes
    write_span(cache, entry, entry.span(1, 1, 1), seed=3)
    cache.reset()
    assert cache.lengths == (0,) * entry.batch
    write_span(cache, entry, entry.span(2, 1, 2), seed=0)
    cache.advance()
    assert cache.digest() == fresh.digest()
    assert cache.num_bytes == num_bytes


@each_cache
def test_what_a_cache_cannot_do_it_refuses_and_names_what_to_do_instead(entry: Entry) -> None:
    cache, reference = filled(entry, entry.span(2, 1, 2))
    instead = r"use|fork|instead|choose|there is no fork"
    if not entry.can_keep:
        with pytest.raises(UnsupportedError, match=f"(?i){instead}"):
            cache.keep(entry.layers[0], torch.zeros(entry.batch, 1, dtype=torch.int64))
    if not entry.can_truncate:
        with pytest.raises(UnsupportedError, match=instead):
            cache.truncate([1] * entry.batch)
    if not entry.can_fork:
        for call in (cache.fork, cache.commit, cache.discard):
            with pytest.raises(UnsupportedError, match=instead):
                call()
    reference.check(cache)
