"""A prefix is reused in whole blocks, as far as every group of layers still has what it needs.

A group that attends to everything needs all blocks of the prefix; a group with a sliding window
needs only those that the window of the next token reaches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from scope_contracts.errors import CacheError
from scope_rt.kv_cache.block_pool import BlockPool
from scope_rt.lm.cache.block_key import BlockKey

Table = list[int | None]
"""Blocks of one sequence in one group, in order of position; None left the window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """The longest prefix that is there, not yet held: the next allocation may evict it."""

    keys: tuple[BlockKey, ...]
    """What each block must still hold when it is taken."""
    tables: tuple[Table, ...]
    """As many entries for every group."""

    @property
    def num_blocks(self) -> int:
        return len(self.keys)

    @property
    def blocks(self) -> list[int]:
        """All blocks to hold."""
        return [block for table in self.tables for block in table if block is not None]


class PrefixCache:
    """Finds full blocks by content in a pool that several groups of layers share.

    `windows` has one entry a group: how many tokens a query sees, its own included; None sees all.
    """

    def __init__(
        self, pool: BlockPool, *, block_size: int, windows: Sequence[int | None] = (None,)
    ) -> None:
        self.pool, self.block_size, self.windows = pool, block_size, tuple(windows)

    def match(self, keys: Sequence[BlockKey], num_tokens: int) -> PrefixMatch:
        """The longest reusable prefix of a sequence of `num_tokens` tokens. Nothing is held yet.

        Its last token is never reused, for its logits are wanted: where all blocks are there, the
        last one is computed again.
        """
        limit = min(len(keys), max(0, num_tokens - 1) // self.block_size)
        found: list[Table] = [
            [self.pool.find((key, group)) for key in keys[:limit]]
            for group in range(len(self.windows))
        ]
        limit = min([limit, *(table.index(None) for table in self._unbroken(found))])
        for count in range(limit, 0, -1):
            firsts = [self.first_needed(count * self.block_size, window) for window in self.windows]
            needs = [table[first:count] for table, first in zip(found, firsts, strict=True)]
            if all(None not in blocks for blocks in needs):
                tables = [
                    [*[None] * first, *blocks] for first, blocks in zip(firsts, needs, strict=True)
                ]
                return PrefixMatch(keys=tuple(keys[:count]), tables=tuple(tables))
        return PrefixMatch(keys=(), tables=tuple([] for _ in self.windows))

    def hold(self, match: PrefixMatch) -> None:
        """Hold all blocks of `match`.

        Raises:
            CacheError: a block was given to somebody else since; nothing was changed.
        """
        for group, table in enumerate(match.tables):
            for key, block in zip(match.keys, table, strict=True):
                if block is not None and self.pool.key(block) != (key, group):
                    raise CacheError(
                        f"block {block} no longer holds the prefix that was matched; match again, "
                        "and start before anything is allocated"
                    )
        self.pool.hit(match.blocks)

    def _unbroken(self, found: Sequence[Table]) -> list[Table]:
        """The tables that must have no gap and have one."""
        return [
            table
            for table, window in zip(found, self.windows, strict=True)
            if window is None and None in table
        ]

    def first_needed(self, length: int, window: int | None) -> int:
        """The first block that a query at position `length`, or any later one, can see."""
        return 0 if window is None else max(0, length - window + 1) // self.block_size

    def register(self, keys: Sequence[BlockKey], tables: Sequence[Table], start: int) -> None:
        """Let later sequences find the held blocks from number `start` on."""
        for group, table in enumerate(tables):
            for key, block in zip(keys[start:], table[start:], strict=False):
                if block is not None:
                    self.pool.register(block, (key, group))
