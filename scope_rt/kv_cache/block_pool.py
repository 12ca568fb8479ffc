"""A block is free, held or kept for its content, never two of these, and every move is O(1).

The pool counts references to block numbers; it owns no memory and knows no tokens. A block that
nobody holds is given out again in one of two orders: blocks without a key last in, first out, for
they are warm and worth nothing; then blocks with a key, which may still be asked for, the least
recently held first (Kwon et al., 2023, section 4.3, with hashed blocks as in vLLM).
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from scope_contracts.errors import CacheError, UserInputError, mismatch


@dataclass(slots=True, kw_only=True)
class PoolCounters:
    """What was done to a pool since it was made, in blocks: exact, and never switched off."""

    allocations: int = 0
    frees: int = 0
    """References that were given back and were the last of their block."""
    hits: int = 0
    """Blocks that were found by key and held again."""
    evictions: int = 0
    """Keyed blocks whose content had to go for an allocation."""


class _Block:
    """One block's state. `newer` and `older` link it into the eviction list while it is there."""

    __slots__ = ("index", "key", "newer", "older", "references")

    def __init__(self, index: int) -> None:
        self.index = index
        self.references = 0
        self.key: Hashable | None = None
        self.older = self.newer = self


class BlockPool:
    """Reference counts, keys and the free blocks of `num_blocks` blocks.

    Raises `UserInputError` when there is no block.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            fix = "raise the cache's byte budget or make its blocks smaller"
            raise UserInputError(mismatch("blocks", got=num_blocks, want="at least 1", fix=fix))
        self.counters = PoolCounters()
        self._blocks = [_Block(index) for index in range(num_blocks)]
        self._keyless = list(reversed(self._blocks))
        self._evictable = _Block(-1)  # the list's head: its `newer` is the next to be evicted
        self._num_evictable = 0
        self._by_key: dict[Hashable, dict[int, _Block]] = {}

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give, those kept for their content included."""
        return len(self._keyless) + self._num_evictable

    def references(self, block: int) -> int:
        """How many hold `block`."""
        return self._blocks[block].references

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each held once and without a key.

        Raises:
            CacheError: fewer are free; nothing was changed.
        """
        if count > self.num_free:
            raise CacheError(
                f"no room for {count} blocks: {self.num_free} of {self.num_blocks} are free; wait "
                "for a sequence to end, or raise the cache's byte budget"
            )
        return [self._take() for _ in range(count)]

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks that somebody holds, as a fork does."""
        for index in blocks:
            block = self._blocks[index]
            assert block.references, "a free block is found by key or allocated, not held"
            block.references += 1

    def hit(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks that `find` returned: none of them can be evicted now."""
        for index in blocks:
            block = self._blocks[index]
            assert block.key is not None, "only a block with a key can be found"
            if not block.references:
                self._unlink(block)
            block.references += 1
            self.counters.hits += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block of a sequence, the last first.

        So the end of a sequence is evicted before its beginning, which more prompts share.

        Raises:
            CacheError: there is no such block, or it would be freed more often than it is held;
                nothing was changed.
        """
        dropped: dict[int, int] = {}
        for index in blocks:
            if not 0 <= index < self.num_blocks:
                raise CacheError(
                    f"block {index} is not of this pool, which has 0 to {self.num_blocks - 1}; "
                    "free tables in the pool that gave them"
                )
            dropped[index] = dropped.get(index, 0) + 1
            if dropped[index] > self._blocks[index].references:
                raise CacheError(
                    f"block {index} is freed twice: it is held {self._blocks[index].references} "
                    f"times and was to be dropped {dropped[index]} times; free every table once"
                )
        for index in reversed(blocks):
            block = self._blocks[index]
            block.references -= 1
            if not block.references:
                self._give(block)

    def register(self, block: int, key: Hashable) -> None:
        """Let `find` know a held block by its content; a twin that has this key keeps it too.

        A block that has a key already keeps that one.
        """
        entry = self._blocks[block]
        assert entry.references, "content of a free block is anybody's"
        if entry.key is None:
            entry.key = key
            self._by_key.setdefault(key, {})[block] = entry

    def key(self, block: int) -> Hashable | None:
        """Under which others find `block`, so that its content must stay; None: nobody does."""
        return self._blocks[block].key

    def find(self, key: Hashable) -> int | None:
        """The block registered first of those that still have `key`."""
        return next(iter(self._by_key.get(key, ())), None)

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` nobody holds: holding them makes so many fewer free."""
        return sum(not self._blocks[block].references for block in blocks)

    def reset(self) -> None:
        """Forget every key, as after the weights have changed. Counters go on.

        Raises:
            CacheError: a block is held; nothing was changed.
        """
        if self.num_free != self.num_blocks:
            held = self.num_blocks - self.num_free
            raise CacheError(f"{held} blocks are in use; end or free their sequences, then reset")
        while self._num_evictable:
            block = self._evictable.newer
            self._unlink(block)
            self._drop_key(block)
            self._keyless.append(block)

    def _take(self) -> int:
        if self._keyless:
            block = self._keyless.pop()
        else:
            block = self._evictable.newer
            self._unlink(block)
            self._drop_key(block)
            self.counters.evictions += 1
        block.references = 1
        self.counters.allocations += 1
        return block.index

    def _give(self, block: _Block) -> None:
        self.counters.frees += 1
        if block.key is None:
            self._keyless.append(block)
            return
        newest = self._evictable.older
        block.older, block.newer = newest, self._evictable
        newest.newer = self._evictable.older = block
        self._num_evictable += 1

    def _unlink(self, block: _Block) -> None:
        block.older.newer, block.newer.older = block.newer, block.older
        block.older = block.newer = block
        self._num_evictable -= 1

    def _drop_key(self, block: _Block) -> None:
        if block.key is None:
            return
        twins = self._by_key[block.key]
        del twins[block.index]
        if not twins:
            del self._by_key[block.key]
        block.key = None
