"""Where a pool is full requests wait or are preempted, and everybody gets the same answer."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scope_rt.lm.cache.block_key import BlockKey
from tests.lm.paged_batch import BLOCK
from tests.lm.specialists import NAMES, alone, answers, crowd, loop, request


def test_a_full_pool_makes_requests_wait_and_all_end_with_the_answers_of_a_large_one() -> None:
    requests = crowd(24)
    small = loop(num_blocks=14)
    done = answers(small, requests)
    assert len(done) == 24
    assert small.counters.preemptions > 0
    assert {name: answer.tokens for name, answer in done.items()} == {
        name: answer.tokens for name, answer in answers(loop(), requests).items()
    }
    assert small.store.pool.num_free == 14


def test_a_request_that_finds_no_room_holds_nothing_and_evicts_nothing_while_it_waits() -> None:
    of, prefix = loop(num_blocks=12), list(range(1, 18))  # 4 whole blocks and a token
    answers(of, [request("gone", prompt=prefix, new=1)])
    of.submit(request("large", "rust", prompt=range(1, 29), new=4))
    of.step()
    of.submit(request("waits", prompt=[*prefix, *range(1, 10)], new=1))  # 3 blocks on its 4
    before = (of.store.pool.counters.hits, of.store.pool.counters.evictions)
    of.step()
    assert of.num_unanswered == 2
    assert (of.store.pool.counters.hits, of.store.pool.counters.evictions) == before
    done = {answer.request.name: answer for answer in of.run()}
    assert done["waits"].tokens_reused == 16
    assert done["waits"].preemptions == 0


def test_a_request_that_has_just_ended_gives_its_blocks_and_is_not_preempted() -> None:
    older = request("older", "rust", prompt=range(1, 14), new=8)
    newer = request("newer", "cpp", prompt=range(1, 5), new=5)
    done = answers(loop(num_blocks=6), [older, newer])  # full when newer ends, in the same step
    assert done["newer"].tokens == alone(newer)
    assert done["older"].tokens == alone(older)
    assert done["newer"].preemptions == 0


def test_the_oldest_request_is_never_preempted_and_ends_first() -> None:
    of = loop(num_blocks=10)
    requests = [request(f"r{n}", NAMES[n % 8], prompt=range(1, 6 + n), new=12) for n in range(8)]
    done = answers(of, requests)
    assert of.counters.preemptions > 0
    assert done["r0"].preemptions == 0
    assert next(iter(done)) == "r0"


def test_equal_requests_end_in_the_order_in_which_they_came_preempted_or_not() -> None:
    of = loop(num_blocks=10)
    requests = [request(f"r{n}", NAMES[n % 8], prompt=range(n, n + 8), new=9) for n in range(8)]
    done = answers(of, requests)
    assert of.counters.preemptions > 0
    assert list(done) == [one.name for one in requests]


def test_room_that_a_running_prompt_will_take_is_not_given_to_one_that_waits() -> None:
    of = loop(num_blocks=10, prefill_chunk=8)
    of.submit(request("first", "cpp", prompt=range(1, 33), new=1))  # 8 blocks in 4 steps
    of.step()
    of.submit(request("second", "rust", prompt=range(1, 29), new=1))  # 7 blocks, 8 are free
    assert [done.request.name for done in of.run()] == ["first", "second"]
    assert of.counters.preemptions == 0
    assert of.counters.tokens_prefilled == 32 + 28


def test_every_block_is_hashed_once_however_long_its_request_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, make = [], BlockKey.__init__

    def counted(key: BlockKey, *args: Any, **kwargs: Any) -> None:
        made.append(key)
        make(key, *args, **kwargs)

    monkeypatch.setattr(BlockKey, "__init__", counted)
    of = loop(num_blocks=12)
    requests = [request(f"r{n}", NAMES[n], prompt=range(1, 30), new=12) for n in range(3)]
    answers(of, requests)
    assert len(made) == 3 * (41 // BLOCK)  # the last of 29 + 12 tokens fills no block


@settings(max_examples=5, deadline=None)
@given(st.integers(9, 40), st.integers(1, 12), st.integers(1, 9))
def test_any_pool_that_fits_the_largest_request_answers_all(
    num_blocks: int, max_running: int, prefill_chunk: int
) -> None:
    requests = crowd(8)
    of = loop(num_blocks=num_blocks, max_running=max_running, prefill_chunk=prefill_chunk)
    done = answers(of, requests)
    assert {name: answer.tokens for name, answer in done.items()} == EXPECTED
    assert of.store.pool.num_free == num_blocks


EXPECTED = {one.name: alone(one) for one in crowd(8)}
