"""Every cache answers the same calls, so a model, a test and a benchmark run on any of them.

A cache composes a storage (where rows lie: contiguous, ring, paged), a codec (how their numbers are
stored) and a policy (which of them stay). The order of calls is always

    extend(num_tokens)             plan, check and make room: the only call that may refuse
    append(layer, *planes) ...     write; again for the same layer overwrites the same rows
    view(layer) ...                all visible rows, the new ones included
    advance()                      once, after the last layer

and a span between `fork` and `discard` leaves no trace.

A video stream's cache does not answer these calls. It is a `FrameCache`, which plans a chunk's
window at once, overwrites in place and cannot go back.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from scope_contracts.row_format import RowFormat
from scope_rt.kv_cache.counters import CacheCounters


class KVCache(Protocol):
    """Rows of a batch of B sequences in all layers. A plane is `[B, T, heads, dim]`.

    A cache that cannot do one of these raises `UnsupportedError`, which names what to do instead.
    """

    @property
    def counters(self) -> CacheCounters:
        """What was done to it so far."""
        ...

    @property
    def format(self) -> RowFormat:
        """What this rank holds of one token in one layer."""
        ...

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens each sequence has advanced by: its next position, whatever was evicted."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        ...

    def extend(self, num_tokens: Sequence[int]) -> None:
        """Open the next span: sequence b gets `num_tokens[b]` rows.

        Again before `advance`, it opens the same span anew.

        Raises:
            CacheError: there is no room; nothing was changed.
        """
        ...

    def append(self, layer: int, *planes: Tensor) -> None:
        """Write the span's rows of one layer, one tensor for every plane of the format.

        T is the largest count of the span; sequence b takes its first `num_tokens[b]` rows.
        """
        ...

    def view(self, layer: int) -> tuple[Tensor, ...]:
        """Every plane of all visible rows, `[B, K, heads, dim]`; order is the storage's own.

        K is the largest of the batch; `positions` tells which rows are real.
        """
        ...

    def positions(self, layer: int) -> Tensor:
        """Position of every row that `view(layer)` shows, int64 `[B, K]`; -1 marks padding."""
        ...

    def advance(self) -> None:
        """Make the span part of the cache."""
        ...

    def keep(self, layer: int, rows_BK: Tensor) -> None:
        """Evict all of a layer but these rows of `view(layer)`; positions stay what they were."""
        ...

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forget all positions from `lengths[b]` on."""
        ...

    def fork(self) -> None:
        """Begin a speculative span; there is one at a time."""
        ...

    def commit(self) -> None:
        """End the speculative span and keep what it did."""
        ...

    def discard(self) -> None:
        """End the speculative span and be as if it had never begun."""
        ...

    def reset(self) -> None:
        """Forget everything; the memory stays. Counters go on."""
        ...

    def digest(self) -> str:
        """BLAKE2b over every visible row and its position, in order of position, and layer."""
        ...
