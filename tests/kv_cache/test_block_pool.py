"""Blocks are given out, shared and taken back by count, in an order that can be foretold."""

import random
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scope_contracts.errors import CacheError, UserInputError
from scope_rt.kv_cache import block_pool
from scope_rt.kv_cache.block_pool import BlockPool, PoolCounters


def pool_with_keyed(num_blocks: int, *keys: str) -> tuple[BlockPool, list[int]]:
    """A pool in which the first blocks hold content under `keys` and nobody holds them."""
    pool = BlockPool(num_blocks)
    blocks = pool.allocate(len(keys))
    for block, key in zip(blocks, keys, strict=True):
        pool.register(block, key)
        pool.free([block])
    return pool, blocks


def state(pool: BlockPool) -> tuple[object, ...]:
    """All that can be asked without changing anything."""
    references = tuple(pool.references(block) for block in range(pool.num_blocks))
    return pool.num_free, keyed(pool), references, vars_of(pool.counters)


def keyed(pool: BlockPool) -> list[int]:
    """Blocks that are known by their content."""
    return [block for block in range(pool.num_blocks) if pool.key(block) is not None]


def vars_of(counters: PoolCounters) -> tuple[int, ...]:
    return counters.allocations, counters.frees, counters.hits, counters.evictions


def test_a_fresh_pool_gives_adjacent_blocks() -> None:
    assert BlockPool(4).allocate(3) == [0, 1, 2]


def test_keyless_blocks_come_back_last_in_first_out() -> None:
    pool = BlockPool(8)
    first, second = pool.allocate(2), pool.allocate(3)
    pool.free(first)
    pool.free(second)
    assert pool.allocate(5) == [*second, *first]


def test_keyed_blocks_are_evicted_least_recently_held_first_and_after_all_keyless_ones() -> None:
    pool, (a, b, c) = pool_with_keyed(5, "a", "b", "c")
    keyless = pool.allocate(2)
    pool.hit([a])
    pool.free([a])
    pool.free(keyless)
    assert pool.allocate(5) == [*keyless, b, c, a]


def test_the_end_of_a_freed_sequence_is_evicted_before_its_beginning() -> None:
    pool = BlockPool(3)
    table = pool.allocate(3)
    for block, key in zip(table, "abc", strict=True):
        pool.register(block, key)
    pool.free(table)
    assert pool.allocate(3) == table[::-1]


def test_an_evicted_block_is_not_found_any_more() -> None:
    pool, (a, b) = pool_with_keyed(2, "a", "b")
    assert pool.find("a") == a
    assert pool.allocate(1) == [a]
    assert (pool.find("a"), pool.find("b")) == (None, b)
    assert pool.key(a) is None
    assert pool.counters.evictions == 1


def test_a_held_block_cannot_be_evicted_however_long_ago_it_was_asked_for() -> None:
    pool, (a, b) = pool_with_keyed(2, "a", "b")
    pool.hit([a])
    assert pool.num_free == 1
    assert pool.allocate(1) == [b]
    with pytest.raises(CacheError, match="no room for 1 blocks: 0 of 2"):
        pool.allocate(1)
    assert pool.find("a") == a


def test_a_block_is_free_only_when_its_last_holder_frees_it() -> None:
    pool, (a,) = pool_with_keyed(1, "a")
    pool.hit([a])
    pool.hit([a])
    pool.hold([a])
    for held in (2, 1):
        pool.free([a])
        assert (pool.references(a), pool.num_free) == (held, 0)
    pool.free([a])
    assert (pool.references(a), pool.num_free) == (0, 1)
    assert pool.counters.frees == 2  # the filling's and the last one


def test_of_two_blocks_with_equal_content_the_twin_serves_when_one_is_evicted() -> None:
    pool = BlockPool(2)
    first, twin = pool.allocate(2)
    pool.register(first, "a")
    pool.register(twin, "a")
    assert pool.find("a") == first
    assert keyed(pool) == [first, twin]
    pool.free([first])
    assert pool.allocate(1) == [first]
    assert pool.find("a") == twin


def test_a_block_keeps_the_key_it_was_registered_with() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.register(block, "a")
    pool.register(block, "b")
    assert (pool.find("a"), pool.find("b")) == (block, None)


def test_a_failed_allocation_changes_nothing() -> None:
    pool, (a, _) = pool_with_keyed(4, "a", "b")
    pool.hit([a])
    before = state(pool)
    with pytest.raises(CacheError, match="no room for 4 blocks: 3 of 4 are free"):
        pool.allocate(4)
    assert state(pool) == before
    assert pool.find("b") is not None


@pytest.mark.parametrize("twice", [lambda table: table, lambda table: table[:1] * 2])
def test_a_double_free_raises_and_changes_nothing(twice: object) -> None:
    pool = BlockPool(3)
    table = pool.allocate(2)
    assert callable(twice)
    wrong = twice(table)
    if wrong == table:
        pool.free(table)
    before = state(pool)
    with pytest.raises(CacheError, match="freed twice"):
        pool.free(wrong)
    assert state(pool) == before


@pytest.mark.parametrize("foreign", [-1, 3, 99])
def test_a_block_of_no_number_in_the_pool_is_refused_and_changes_nothing(foreign: int) -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    before = state(pool)
    with pytest.raises(CacheError, match=f"block {foreign} is not of this pool, which has 0 to 2"):
        pool.free([block, foreign])
    assert state(pool) == before


def test_reset_forgets_all_content_and_refuses_while_a_block_is_in_use() -> None:
    pool, (a, b) = pool_with_keyed(3, "a", "b")
    pool.hit([a])
    before = state(pool)
    with pytest.raises(CacheError, match="1 blocks are in use"):
        pool.reset()
    assert state(pool) == before
    pool.free([a])
    pool.reset()
    assert (keyed(pool), pool.num_free, pool.find("b")) == ([], 3, None)
    assert sorted(pool.allocate(3)) == sorted({a, b, 2})
    assert pool.counters.evictions == 0


def test_a_pool_of_no_blocks_is_refused() -> None:
    with pytest.raises(UserInputError, match="byte budget"):
        BlockPool(0)


class ModelOfThePool:
    """What the pool should do, written with slow and plain containers."""

    def __init__(self, num_blocks: int) -> None:
        self.references = Counter[int]()
        self.keyless = list(range(num_blocks))[::-1]
        self.evictable: OrderedDict[int, str] = OrderedDict()
        self.keys: dict[int, str] = {}

    def allocate(self, count: int) -> list[int] | None:
        if count > len(self.keyless) + len(self.evictable):
            return None
        taken = []
        for _ in range(count):
            if self.keyless:
                block = self.keyless.pop()
            else:
                block, _ = self.evictable.popitem(last=False)
                del self.keys[block]
            self.references[block] = 1
            taken.append(block)
        return taken

    def free(self, table: list[int]) -> None:
        for block in reversed(table):
            self.references[block] -= 1
            if not self.references[block] and block in self.keys:
                self.evictable[block] = self.keys[block]
            elif not self.references[block]:
                self.keyless.append(block)

    def hit(self, block: int) -> None:
        self.evictable.pop(block, None)
        self.references[block] += 1


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.randoms(use_true_random=False))
def test_any_order_of_calls_leaves_what_plain_containers_would_have(
    num_blocks: int, rng: random.Random
) -> None:
    pool, model, tables = BlockPool(num_blocks), ModelOfThePool(num_blocks), list[list[int]]()
    for _ in range(60):
        action = rng.choice(("allocate", "free", "register", "hit"))
        key = rng.choice("abcd")
        if action == "allocate":
            count = rng.randint(0, 4)
            expected = model.allocate(count)
            if expected is None:
                with pytest.raises(CacheError):
                    pool.allocate(count)
            else:
                assert pool.allocate(count) == expected
                tables.append(expected)
        elif action == "free" and tables:
            table = tables.pop(rng.randrange(len(tables)))
            pool.free(table)
            model.free(table)
        elif action == "register" and any(tables):
            block = rng.choice([block for table in tables for block in table])
            pool.register(block, key)
            model.keys.setdefault(block, key)
        elif action == "hit" and (found := pool.find(key)) is not None:
            assert model.keys[found] == key
            pool.hit([found])
            model.hit(found)
            tables.append([found])
        assert pool.num_free == len(model.keyless) + len(model.evictable)
        assert all(pool.references(b) == model.references[b] for b in range(num_blocks))
        assert keyed(pool) == sorted(model.keys)


def test_a_million_operations_are_counted_one_by_one_and_lose_no_block() -> None:
    pool, held = BlockPool(512), list[list[int]]()
    for index in range(125_000):  # 4 blocks taken and 4 given back each time
        table = pool.allocate(4)
        if index % 3 == 0:
            pool.register(table[0], index % 101)
        held.append(table)
        if len(held) == 100:
            pool.free(held.pop((index * 7) % 100))
    for table in held:
        pool.free(table)
    assert pool.counters.allocations == pool.counters.frees == 500_000
    assert pool.num_free == pool.num_blocks


def lines_run(call: Callable[[], object]) -> int:
    """Calls and lines of the pool that `call` runs, those of generators and loops included."""
    events = 0

    def count(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal events
        if frame.f_code.co_filename != block_pool.__file__:
            return None
        events += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        call()
    finally:
        sys.settrace(before)
    return events


def lines_by_move(num_blocks: int) -> dict[str, int]:
    """What every move costs in a pool of which each block was held, and has a key."""
    pool = BlockPool(num_blocks)
    blocks = pool.allocate(num_blocks)
    for block in blocks:
        pool.register(block, block)
    kept, others = blocks[:8], blocks[8:]
    pool.free(others)
    moves: dict[str, Callable[[], object]] = {
        "find": lambda: pool.find(others[0]),
        "hit": lambda: pool.hit(others[:2]),
        "hold": lambda: pool.hold(kept[:2]),
        "free": lambda: pool.free(kept),
        "evict": lambda: pool.allocate(2),
        "register": lambda: pool.register(others[-1], "new"),
        "free, no key": lambda: pool.free(others[-2:-1]),
        "count free": lambda: pool.num_free,
    }
    return {name: lines_run(move) for name, move in moves.items()}


def test_no_move_costs_more_in_a_large_pool() -> None:
    small, large = lines_by_move(64), lines_by_move(4096)
    assert small == large
    assert min(small.values()) > 1
