"""Rows are a function of all leaves up to them, so equal pasts share them and undo is cheap.

Blocks of leaves are named by a hash chained over everything before them. What an edit drops is kept
under its name, up to a number of bytes; the block that was used longest ago goes first.
"""

import hashlib
from collections import OrderedDict

from scope_rt.lm.hierarchical.cache import SavedRows
from scope_rt.lm.hierarchical.context import WorkingContext


def block_names(context: WorkingContext, *, block_leaves: int) -> list[bytes]:
    """The chained name of every full block of a context, for one model and one cache."""
    starts = context.starts.numpy()
    tokens, ends = context.tokens.numpy(), (context.starts + context.spans).numpy()
    names, name = [], b""
    for first in range(0, context.num_leaves - block_leaves + 1, block_leaves):
        block = slice(first, first + block_leaves)
        digest = hashlib.blake2b(name, digest_size=16)
        digest.update(starts[block].tobytes())
        digest.update(tokens[starts[first] : ends[block][-1]].tobytes())
        name = digest.digest()
        names.append(name)
    return names


class ReplacedBlocks:
    """Rows that edits dropped, by name, at most `max_bytes` of them.

    A name says nothing of the model and the cache, so a store belongs to one `EditableContext`.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.hits = 0
        self._blocks: OrderedDict[bytes, SavedRows] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, name: bytes) -> bool:
        return name in self._blocks

    def put(self, name: bytes, rows: SavedRows) -> None:
        """Keep rows; a block larger than all the store is not kept."""
        if name in self._blocks:
            self._blocks.move_to_end(name)
            return
        if rows.num_bytes > self.max_bytes:
            return
        self._blocks[name] = rows
        self.num_bytes += rows.num_bytes
        while self.num_bytes > self.max_bytes:
            _, oldest = self._blocks.popitem(last=False)
            self.num_bytes -= oldest.num_bytes

    def take(self, name: bytes) -> SavedRows | None:
        """The rows of that name, or None; they leave the store, for the cache has them again."""
        rows = self._blocks.pop(name, None)
        if rows is not None:
            self.num_bytes -= rows.num_bytes
            self.hits += 1
        return rows
