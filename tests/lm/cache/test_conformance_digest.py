"""Equal rows at equal positions give equal digests in every storage, and others do not."""

import torch

from tests.lm.cache.entries import ENTRIES, Entry
from tests.lm.cache.list_of_rows import each_cache, filled, that_keep


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
