"""Sequences share blocks of one pool; a block is written only by the one sequence that holds it.

Memory is `[layers, blocks, block_size, heads, width]` for every part of every plane, allocated
once: a `RowStore` of one batch row whose slots are the blocks' rows. One layer of it,
`[blocks, block_size, heads, width]`, is what a kernel that takes a block table reads in place. The
last block is never given out and stays zero: it stands where a table has nothing to show.

Layers with another window have tables of their own, because their blocks leave earlier. So that
one pool serves all groups of layers, groups have equal sizes and a block holds one group's layers.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from scope_contracts.errors import UserInputError, mismatch
from scope_contracts.row_format import RowFormat
from scope_rt.kv_cache.block_pool import BlockPool
from scope_rt.kv_cache.counters import CacheCounters
from scope_rt.kv_cache.row_store import RowStore
from scope_rt.lm.cache.backend_policy import DeviceTraits, choose_lane
from scope_rt.lm.cache.block_key import BlockKey, SharingScope, block_keys
from scope_rt.lm.cache.layer_map import AttnLayerMap
from scope_rt.lm.cache.page_support import PageSupport
from scope_rt.lm.cache.prefix_cache import PrefixCache, PrefixMatch, Table
from scope_rt.lm.specs.layer_groups import layer_groups


@dataclass(slots=True)
class PagedSequence:
    """One sequence's blocks, by group of layers, and where it stands."""

    tables: list[Table]
    length: int = 0
    keys: list[BlockKey] = field(default_factory=list)
    """Of the full blocks that others may find."""

    def copy(self) -> "PagedSequence":
        return PagedSequence([list(table) for table in self.tables], self.length, list(self.keys))

    def become(self, other: "PagedSequence") -> None:
        """Take over what `other` holds; nobody may use that one any more."""
        self.tables, self.length, self.keys = other.tables, other.length, other.keys

    @property
    def blocks(self) -> list[int]:
        """All blocks it holds; the ends of all groups lie last."""
        longest = max(map(len, self.tables))
        rows = [table[index : index + 1] for index in range(longest) for table in self.tables]
        return [block for row in rows for block in row if block is not None]


@dataclass(frozen=True, slots=True)
class Growth:
    """What one sequence's next tokens do to the pool; nothing was done yet."""

    num_tokens: int
    num_new: int
    dropped: list[int]
    """Blocks that leave its tables: behind the window, or left from a longer span."""


class PagedStore:
    """A pool of `num_blocks` blocks of `block_size` tokens, and the memory they stand for.

    Args:
        row_format: this rank's share of one token in one layer.
        max_tokens: of one sequence; None leaves it to the pool.
        windows: tokens that each attention layer sees, its own included; None sees all.
        page_support: of the kernel that will read, which decides what is read in place; None is
            the fastest kernel that serves these rows on this device (`choose_lane`).
        in_place_only: refuse what that kernel would have to gather.

    Raises:
        UserInputError: no block, a size that cannot be, or one that the kernel refuses.
    """

    def __init__(
        self,
        row_format: RowFormat,
        *,
        layers: AttnLayerMap,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        max_tokens: int | None = None,
        windows: Sequence[int | None] | None = None,
        page_support: PageSupport | None = None,
        in_place_only: bool = False,
    ) -> None:
        if block_size < 1:
            raise UserInputError(mismatch("block size", got=block_size, want="at least 1 token"))
        if page_support is None:
            page_support = choose_lane(DeviceTraits.of(device), row_format).lane.pages
        if in_place_only:
            page_support.require(block_size)
        self.layers, self.block_size, self.page_support = layers, block_size, page_support
        self.max_tokens = max_tokens
        self.groups = layer_groups([None] * layers.num_slots if windows is None else windows)
        if sum(len(group.slots) for group in self.groups) != layers.num_slots:
            want = f"one for each of {layers.num_slots} attention layers"
            raise UserInputError(mismatch("windows", got=len(windows or ()), want=want))
        self.pool = BlockPool(num_blocks)
        self.prefixes = PrefixCache(
            self.pool, block_size=block_size, windows=[group.window for group in self.groups]
        )
        self.rows = RowStore(
            row_format,
            num_layers=len(self.groups[0].slots),
            batch=1,
            num_slots=(num_blocks + 1) * block_size,
            device=device,
        )
        self.counters = CacheCounters()

    @property
    def zero_block(self) -> int:
        return self.pool.num_blocks

    def locate(self, layer: int) -> tuple[int, int]:
        """Group of a layer of the model, and its place in a block."""
        slot = self.layers.slot(layer)
        for index, group in enumerate(self.groups):
            if slot in group.slots:
                return index, group.slots.index(slot)
        raise AssertionError("groups cover all slots")

    def keys(
        self, tokens: Sequence[int], scope: SharingScope, known: Sequence[BlockKey] = ()
    ) -> list[BlockKey]:
        """`block_keys` at this store's block size."""
        return block_keys(tokens, block_size=self.block_size, scope=scope, known=known)

    def most_blocks(self, num_tokens: int, *, at_once: int) -> int:
        """Blocks that a sequence of `num_tokens` holds at most if it grows by up to `at_once`."""
        return sum(
            group.most_blocks(num_tokens, block_size=self.block_size, at_once=at_once)
            for group in self.groups
        )

    def start(self, match: PrefixMatch | None = None) -> PagedSequence:
        """A sequence that holds the blocks of `match` (none: it starts from nothing).

        Raises:
            CacheError: the match is stale; nothing was changed.
        """
        if match is None:
            return PagedSequence([[] for _ in self.groups])
        self.prefixes.hold(match)
        length = match.num_blocks * self.block_size
        self.counters.prefix_hits += length
        return PagedSequence([list(table) for table in match.tables], length, list(match.keys))

    def end(self, sequence: PagedSequence) -> None:
        """Free all blocks of a sequence; those with keys can still be found until evicted."""
        self.pool.free(sequence.blocks)
        sequence.tables, sequence.length, sequence.keys = [[] for _ in self.groups], 0, []

    def publish(self, sequence: PagedSequence, keys: Sequence[BlockKey]) -> None:
        """Let others find the sequence's full blocks; `keys` are those of all its tokens."""
        full = list(keys[: sequence.length // self.block_size])
        self.prefixes.register(full, sequence.tables, len(sequence.keys))
        sequence.keys = full

    def plan_growth(self, sequence: PagedSequence, num_tokens: int) -> Growth:
        """What `grow` will take and drop; pure."""
        length, end = sequence.length, self._end_block(sequence, num_tokens)
        num_new, dropped = 0, []
        for group, table in zip(self.groups, sequence.tables, strict=True):
            first = self.prefixes.first_needed(length, group.window)
            leaving = [*table[:first], *table[end:]]
            dropped += [block for block in leaving if block is not None]
            num_new += max(0, end - len(table)) + self._must_copy(sequence, table, num_tokens)
        return Growth(num_tokens, num_new, dropped)

    def fits(self, growths: Sequence[Growth]) -> bool:
        """Whether the pool can serve all of them at once."""
        drops = Counter(block for growth in growths for block in growth.dropped)
        freed = sum(self.pool.references(block) == count for block, count in drops.items())
        return sum(growth.num_new for growth in growths) <= self.pool.num_free + freed

    def grow(self, sequences: Sequence[PagedSequence], growths: Sequence[Growth]) -> None:
        """Make room for growths that `fits` took, planned on the sequences as they stand.

        All of them drop first: one may take what another leaves.
        """
        for sequence, growth in zip(sequences, growths, strict=True):
            self._shrink(sequence, growth)
        for sequence, growth in zip(sequences, growths, strict=True):
            end = self._end_block(sequence, growth.num_tokens)
            for table in sequence.tables:
                if self._must_copy(sequence, table, growth.num_tokens):
                    self._copy_on_write(table, sequence.length // self.block_size)
                table += self.pool.allocate(max(0, end - len(table)))

    def _shrink(self, sequence: PagedSequence, growth: Growth) -> None:
        for group, table in zip(self.groups, sequence.tables, strict=True):
            first = self.prefixes.first_needed(sequence.length, group.window)
            left = sum(block is not None for block in table[:first])
            self.counters.rows_evicted += left * self.block_size * len(group.slots)
            table[:first] = [None] * min(first, len(table))
            del table[self._end_block(sequence, growth.num_tokens) :]
        self.pool.free(growth.dropped)

    def _end_block(self, sequence: PagedSequence, num_tokens: int) -> int:
        return math.ceil((sequence.length + num_tokens) / self.block_size)

    def _must_copy(self, sequence: PagedSequence, table: Table, num_tokens: int) -> bool:
        """Whether the next tokens would change a block that somebody else holds, or may find."""
        if not num_tokens or sequence.length % self.block_size == 0:
            return False
        block = table[sequence.length // self.block_size]
        assert block is not None, "a window always reaches the newest block"
        return self.pool.references(block) > 1 or self.pool.key(block) is not None

    def _copy_on_write(self, table: Table, index: int) -> None:
        shared = table[index]
        assert shared is not None, "checked by _must_copy"
        (own,) = self.pool.allocate(1)
        for layer in range(self.rows.num_layers):
            self.rows.copy(layer, source=self._span(shared), target=self._span(own), batch=0)
        self.pool.free([shared])
        table[index] = own

    def _span(self, block: int) -> slice:
        return slice(block * self.block_size, (block + 1) * self.block_size)


def num_blocks_in(
    budget_bytes: int, row_format: RowFormat, *, windows: Sequence[int | None], block_size: int
) -> int:
    """Blocks that a budget pays for beside the zero block; `windows` as of `PagedStore`.

    Raises:
        UserInputError: it does not pay for one.
    """
    group_layers = len(layer_groups(windows)[0].slots)
    block_bytes = row_format.bytes_per_row * group_layers * block_size
    num_blocks = budget_bytes // block_bytes - 1
    if num_blocks < 1:
        want = f"at least {2 * block_bytes} for one block and the zero block"
        fix = "raise it, or make blocks smaller"
        raise UserInputError(mismatch("cache budget bytes", got=budget_bytes, want=want, fix=fix))
    return num_blocks
