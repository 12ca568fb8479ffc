"""Blocks are shared only where everything before them is equal, and only whole blocks are."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scope_rt.kv_cache.block_pool import BlockPool
from scope_rt.lm.cache.block_key import BlockKey, SharingScope, block_keys
from scope_rt.lm.cache.prefix_cache import PrefixCache, PrefixMatch

SIZE = 4
HOME = SharingScope(domain="cpp")
Window = int | None


def keys_of(tokens: Sequence[int], scope: SharingScope = HOME) -> list[BlockKey]:
    return block_keys(tokens, block_size=SIZE, scope=scope)


class Filled:
    """A pool in which one sequence was cached, under every group, and has ended."""

    def __init__(self, tokens: Sequence[int], *, windows: Sequence[Window] = (None,)) -> None:
        keys = keys_of(tokens)
        self.pool = BlockPool(64)
        self.cache = PrefixCache(self.pool, block_size=SIZE, windows=windows)
        self.tables = [[*self.pool.allocate(len(keys))] for _ in windows]
        self.cache.register(keys, [list(table) for table in self.tables], 0)
        for table in self.tables:
            self.pool.free(table)

    def match(self, tokens: Sequence[int], scope: SharingScope = HOME) -> PrefixMatch:
        return self.cache.match(keys_of(tokens, scope), len(tokens))

    def lose(self, group: int, *indices: int) -> None:
        """Evict blocks of a group: others stay, as if they had been held meanwhile."""
        lost = [self.tables[group][index] for index in indices]
        kept = [block for table in self.tables for block in table if block not in lost]
        self.pool.hit(kept)
        self.pool.free(self.pool.allocate(self.pool.num_free))
        self.pool.free(kept)


def test_a_match_of_2_9_blocks_reuses_2() -> None:
    cached = Filled(range(100, 140))
    tokens = [*range(100, 111), *range(900, 910)]  # 11 equal tokens: 2.75 blocks of 4
    assert cached.match(tokens).num_blocks == 2
    assert cached.match(tokens).blocks == cached.tables[0][:2]


def test_the_last_block_of_a_full_hit_is_computed_again() -> None:
    cached = Filled(range(12))
    assert cached.match(range(12)).num_blocks == 2
    assert cached.match(range(13)).num_blocks == 3


def test_a_prompt_shorter_than_a_block_matches_nothing() -> None:
    assert Filled(range(12)).match(range(3)).num_blocks == 0


def test_matching_holds_nothing_and_evicts_nothing() -> None:
    cached = Filled(range(12))
    before = (cached.pool.num_free, cached.pool.counters.hits)
    cached.match(range(20))
    assert (cached.pool.num_free, cached.pool.counters.hits) == before


@pytest.mark.parametrize(
    "other",
    [
        SharingScope(domain="rust"),
        SharingScope(domain="cpp", lora_revision="style@2"),
        SharingScope(domain="cpp", salt="tenant 7"),
        SharingScope(domain="cp", lora_revision="p"),
        SharingScope(domain="", salt="cpp"),
    ],
    ids=["specialist", "lora revision", "salt", "fields run together", "fields swapped"],
)
def test_equal_prompts_of_different_scopes_never_share(other: SharingScope) -> None:
    cached = Filled(range(20))
    assert cached.match(range(20)).num_blocks == 4
    assert cached.match(range(20), other).num_blocks == 0
    assert keys_of(range(4), other)[0].digest != keys_of(range(4))[0].digest


def test_a_block_is_the_same_only_behind_the_same_beginning() -> None:
    first, second = keys_of([1, 1, 1, 1, 5, 6, 7, 8]), keys_of([2, 2, 2, 2, 5, 6, 7, 8])
    assert first[1].tokens == second[1].tokens
    assert first[1] != second[1]


def test_tokens_do_not_run_together() -> None:
    assert keys_of([1, 11, 1, 1]) != keys_of([11, 1, 1, 1])


def test_a_hash_collision_shares_nothing() -> None:
    def collide(content: bytes) -> bytes:
        return b"same"

    def keys(tokens: Sequence[int]) -> list[BlockKey]:
        return block_keys(tokens, block_size=SIZE, scope=HOME, digest=collide)

    pool = BlockPool(4)
    cache = PrefixCache(pool, block_size=SIZE)
    a_then_b, c = [*range(4), *range(4, 8)], [*range(50, 54)]
    cache.register(keys(a_then_b), [[*pool.allocate(2)]], 0)
    cache.register(keys(c), [[*pool.allocate(1)]], 0)
    assert keys(a_then_b)[0].digest == keys(c)[0].digest
    assert cache.match(keys([*c, *range(4, 8), 9]), 9).num_blocks == 1  # c, and not b behind it
    assert cache.match(keys([*range(70, 78)]), 8).num_blocks == 0


def test_equal_chains_become_one_so_that_the_next_comparison_is_short() -> None:
    first, second = keys_of(range(40)), keys_of(range(40))
    assert all(a == b for a, b in zip(first, second, strict=True))
    assert second[-1].parent is first[-2] or first[-1].parent is second[-2]


def test_keys_can_be_continued_as_tokens_come() -> None:
    assert block_keys(range(20), block_size=SIZE, scope=HOME, known=keys_of(range(9))) == keys_of(
        range(20)
    )


def test_a_window_needs_only_the_blocks_that_it_reaches() -> None:
    cached = Filled(range(20), windows=[6])
    match = cached.match(range(17))
    assert match.num_blocks == 4
    # The query at 16 sees 11..16: blocks 2 and 3.
    assert match.tables[0] == [None, None, *cached.tables[0][2:4]]
    cached.lose(0, 0, 1)
    assert cached.match(range(17)).num_blocks == 4


def test_a_gap_inside_the_window_falls_back_to_a_shorter_prefix() -> None:
    cached = Filled(range(24), windows=[6])
    cached.lose(0, 3)
    # 5 blocks would need 3 and 4; 4 blocks 2 and 3; 3 blocks 1 and 2.
    assert cached.match(range(21)).num_blocks == 3


def test_the_beginning_of_a_sequence_needs_no_more_than_there_is() -> None:
    cached = Filled(range(8), windows=[100])
    assert cached.match(range(9)).tables == (cached.tables[0],)


def test_all_groups_of_layers_must_have_what_they_need() -> None:
    cached = Filled(range(24), windows=[None, 6])
    assert cached.match(range(25)).num_blocks == 6
    cached.lose(0, 4)
    assert cached.match(range(25)).num_blocks == 4
    cached = Filled(range(24), windows=[None, 6])
    cached.lose(1, 4)
    assert cached.match(range(25)).num_blocks == 4


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.booleans(), min_size=6, max_size=6),
    st.lists(st.booleans(), min_size=6, max_size=6),
    st.integers(1, 20),
)
def test_a_match_is_the_longest_that_serves_every_group(
    full: list[bool], windowed: list[bool], window: int
) -> None:
    pool = BlockPool(12)
    cache = PrefixCache(pool, block_size=SIZE, windows=[None, window])
    keys, tables = keys_of(range(24)), [[*pool.allocate(6)], [*pool.allocate(6)]]
    holes = [
        [block if there else None for block, there in zip(table, present, strict=True)]
        for table, present in zip(tables, (full, windowed), strict=True)
    ]
    cache.register(keys, holes, 0)

    def serves(count: int) -> bool:
        positions = range(max(0, count * SIZE - window + 1), count * SIZE)
        return all(full[:count]) and all(windowed[position // SIZE] for position in positions)

    want = max(count for count in range(7) if count == 0 or serves(count))
    assert cache.match(keys, 25).num_blocks == want
