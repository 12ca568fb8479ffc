"""Every cache refuses what it cannot do, says why, and holds the rows that it held."""

import copy

import pytest
import torch

from scope_contracts.errors import CacheError, UnsupportedError
from tests.lm.cache.entries import MAX_TOKENS, Entry
from tests.lm.cache.list_of_rows import (
    each_cache,
    filled,
    that_are_bounded,
    that_fork,
    that_truncate,
    write_span,
)


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
