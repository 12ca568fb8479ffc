"""A state can be copied and put back; what it cannot do it refuses by name."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from scope_contracts.errors import CacheError, UnsupportedError
from scope_contracts.tensor_spec import DType
from scope_rt.lm.cache.state import StateCache
from scope_rt.lm.specs.state_format import StateFormat, StatePart

BATCH, LAYERS = 3, (0, 2)
FORMAT = StateFormat(
    parts=(StatePart(name="conv", shape=(4, 2)), StatePart(name="ssm", shape=(5,))),
    dtype=DType.FLOAT32,
)


def cache() -> StateCache:
    return StateCache(FORMAT, layers=LAYERS, batch=BATCH, device=torch.device("cpu"))


def states(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(BATCH, *part.shape, generator=generator) for part in FORMAT.parts)


def step(made: StateCache, seed: int, counts: tuple[int, ...] = (1, 1, 1)) -> None:
    made.extend(counts)
    for layer in LAYERS:
        made.update(layer, *states(seed + layer))
    made.advance()


def test_a_discarded_span_leaves_the_digest_and_a_committed_one_is_straight_decode() -> None:
    straight, made = cache(), cache()
    for each in (straight, made):
        step(each, 1)
    digest = made.digest()
    made.fork()
    step(made, 9)
    assert made.digest() != digest
    made.discard()
    assert (made.digest(), made.lengths) == (digest, (1, 1, 1))
    made.fork()
    step(made, 5)
    made.commit()
    step(straight, 5)
    assert made.digest() == straight.digest()


def test_the_open_span_counts_after_advance_only() -> None:
    made = cache()
    step(made, 1)
    digest = made.digest()
    made.extend([1, 1, 1])
    made.update(0, *states(7))
    assert made.digest() == digest
    made.extend([1, 1, 1])
    with pytest.raises(CacheError, match=r"layers \[0, 2\] got no state"):
        made.advance()


def test_a_sequence_that_takes_no_token_keeps_its_state() -> None:
    made = cache()
    step(made, 1)
    before = [part.clone() for part in made.state(2)]
    step(made, 4, (1, 0, 2))
    for old, now in zip(before, made.state(2), strict=True):
        assert torch.equal(old[1], now[1])
        assert not torch.equal(old[0], now[0])
    assert made.lengths == (2, 1, 3)


def test_a_state_that_is_written_over_later_is_kept_as_it_was_given() -> None:
    made, given = cache(), states(1)
    made.extend([1, 1, 1])
    for layer in LAYERS:
        made.update(layer, *given)
        for part in given:
            part.zero_()
    made.advance()
    for held, part in zip(made.state(0), states(1), strict=True):
        assert torch.equal(held, part)


def test_reset_is_a_fresh_cache_and_the_memory_stays() -> None:
    made = cache()
    step(made, 1)
    num_bytes, address = made.num_bytes, made.state(0)[0].data_ptr()
    made.reset()
    assert made.digest() == cache().digest()
    assert (made.num_bytes, made.state(0)[0].data_ptr()) == (num_bytes, address)
    assert made.num_bytes == FORMAT.bytes_per_layer * BATCH * len(LAYERS)


def test_counters_are_exact() -> None:
    made = cache()
    step(made, 1)
    made.state(0)
    made.digest()
    counted = made.counters
    assert (counted.rows_written, counted.rows_read, counted.advances) == (6, 3, 1)


def test_a_layer_without_a_state_is_refused_and_the_others_are_named() -> None:
    with pytest.raises(CacheError, match="layer 1 has no state; layers 0, 2 do"):
        cache().state(1)


def test_a_state_of_another_shape_is_refused() -> None:
    made = cache()
    made.extend([1, 1, 1])
    with pytest.raises(CacheError, match="want"):
        made.update(0, *states(1)[:1])


@pytest.mark.parametrize(
    ("call", "instead"),
    [
        (lambda made: made.append(0, *states(1)), "update"),
        (lambda made: made.view(0), "state"),
        (lambda made: made.positions(0), "lengths"),
        (lambda made: made.keep(0, torch.zeros(BATCH, 1)), "fork"),
        (lambda made: made.truncate([0, 0, 0]), "fork"),
    ],
    ids=["append", "view", "positions", "keep", "truncate"],
)
def test_what_a_state_cannot_do_names_what_to_do_instead(
    call: Callable[[StateCache], None], instead: str
) -> None:
    made = cache()
    step(made, 1)
    digest = made.digest()
    with pytest.raises(UnsupportedError, match=instead):
        call(made)
    assert made.digest() == digest
