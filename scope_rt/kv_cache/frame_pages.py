"""A slot takes its page from a pool when it is first filled, and keeps it until a reset.

Eviction frees no page: the frame that takes an evicted one's slot takes its page too. So the order
of keys is the ring's, whatever pages there are, and results are equal bits. A stream that has its
pool to itself has its pages in order, and a view copies nothing. In a pool that streams share,
what one has not filled yet is there for the others, and pages that lie apart are gathered.
"""

import torch

from scope_contracts.errors import CacheError, mismatch
from scope_rt.kv_cache.block_pool import BlockPool
from scope_rt.kv_cache.row_store import RowStore, Slots


class PagePool:
    """`rows` cut into pages of `page_tokens` slots; several streams may take from one pool."""

    def __init__(self, rows: RowStore, *, page_tokens: int) -> None:
        if page_tokens < 1 or rows.num_slots % page_tokens:
            want = f"a divisor of {rows.num_slots} slots"
            raise CacheError(mismatch("page_tokens", got=page_tokens, want=want))
        self.rows, self.page_tokens = rows, page_tokens
        self.blocks = BlockPool(rows.num_slots // page_tokens)


class PagedFrames:
    """The table of one stream: entry i is the page of its token slots from `i * page_tokens` on.

    Raises `CacheError` when a page would hold parts of two frames.
    """

    def __init__(self, pool: PagePool, *, frame_tokens: int) -> None:
        if frame_tokens % pool.page_tokens:
            want = f"a divisor of a frame's {frame_tokens} tokens"
            raise CacheError(mismatch("page_tokens", got=pool.page_tokens, want=want))
        self.pool = pool
        self.table: list[int] = []
        self._place_of_token = torch.empty(0, dtype=torch.int64)

    @property
    def rows(self) -> RowStore:
        return self.pool.rows

    def open(self, slots: slice) -> None:
        num_new = slots.stop // self.pool.page_tokens - len(self.table)
        if num_new > 0:
            self.table += self.pool.blocks.allocate(num_new)
            size, device = self.pool.page_tokens, self.rows.device
            starts = torch.tensor(self.table, device=device)[:, None] * size
            self._place_of_token = (starts + torch.arange(size, device=device)).view(-1)

    def place(self, slots: slice) -> Slots:
        size = self.pool.page_tokens
        pages = self.table[slots.start // size : slots.stop // size]
        first = pages[0] if pages else 0
        if pages == list(range(first, first + len(pages))):
            return slice(first * size, (first + len(pages)) * size)
        return self._place_of_token[slots]

    def clear(self) -> None:
        self.pool.blocks.free(self.table)
        self.table = []
