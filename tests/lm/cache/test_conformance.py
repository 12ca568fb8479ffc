"""Every cache does to its rows what a plain list of rows would, whatever the order of calls."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scope_contracts.errors import CacheError
from scope_rt.lm.cache.interface import KVCache
from tests.lm.cache.entries import Entry
from tests.lm.cache.list_of_rows import (
    ListOfRows,
    each_cache,
    filled,
    that_are_bounded,
    that_evict,
    that_fork,
    that_keep,
    truncate_both,
    write_span,
)


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
