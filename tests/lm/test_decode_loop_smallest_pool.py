"""A request that a pool was found large enough for is answered there, and soon."""

import pytest

from scope_contracts.errors import UserInputError
from scope_rt.lm.cache.paged_store import PagedStore
from scope_rt.lm.decode_loop import DecodeLoop
from scope_rt.lm.requests import Completion, Request, Specialist
from tests.lm.eviction_models import tiny_lm
from tests.tiny_models import CPU

WINDOW, BLOCK = 6, 4
MODEL = tiny_lm(
    "qwen2",
    attention="sdpa",
    sliding_window=WINDOW,
    use_sliding_window=True,
    layer_types=None,
    max_window_layers=0,
).double()
REQUEST = Request(name="a", specialist="it", prompt=tuple(range(1, 23)), max_new_tokens=8)
MOST_STEPS = len(REQUEST.prompt) + REQUEST.max_new_tokens
"""A token a step: more would be a request that was preempted and began again."""


def accepted(*, num_blocks: int, chunk: int) -> DecodeLoop | None:
    """A loop on a pool of that size that has the request; None where the pool is too small."""
    it = Specialist("it", MODEL)
    store = PagedStore(
        it.rows.row_format,
        layers=it.rows.layers,
        num_blocks=num_blocks,
        block_size=BLOCK,
        device=CPU,
        windows=it.rows.windows,
    )
    loop = DecodeLoop([it], store, prefill_chunk=chunk)
    try:
        loop.submit(REQUEST)
    except UserInputError:
        return None
    return loop


def answer(loop: DecodeLoop) -> Completion:
    for _ in range(MOST_STEPS):
        done = loop.step()
        if done:
            return done[0]
    pytest.fail(f"not answered; {loop.counters.preemptions} preemptions")


@pytest.mark.parametrize("chunk", range(1, WINDOW + BLOCK))
def test_the_smallest_pool_that_takes_a_request_answers_it_whatever_the_chunk(chunk: int) -> None:
    sizes = (accepted(num_blocks=size, chunk=chunk) for size in range(1, 12))
    smallest = next(loop for loop in sizes if loop is not None)
    largest = accepted(num_blocks=100, chunk=100)
    assert largest is not None
    assert answer(smallest).tokens == answer(largest).tokens
    assert smallest.counters.preemptions == 0
