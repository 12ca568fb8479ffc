"""A stream's cache answers the calls of every other cache, a whole number of frames at a time.

A frame of one token makes it a cache of tokens. What overwrites in place cannot go back: there is
no truncation but to nothing, no speculation, and only the cache's own policy evicts.

Rows, positions, counters, room and the order of calls are the stream cache's own, and so are the
claims about them. It has no `keep`, `truncate`, `fork`, `commit` and `discard`, nor sequences of
unequal length: that those are refused is a claim about this file, and about no cache.
"""

from collections.abc import Sequence

from torch import Tensor

from scope_contracts.errors import CacheError, UnsupportedError
from scope_contracts.row_format import RowFormat
from scope_rt.kv_cache.counters import CacheCounters
from scope_rt.kv_cache.frame_cache import WriteWindow
from scope_rt.kv_cache.slot_cache import SlotCache


class FrameRows:
    """A `KVCache` over a `SlotCache`; all sequences of its batch advance together."""

    def __init__(self, frames: SlotCache) -> None:
        self.frames = frames
        self._open: WriteWindow | None = None
        self._shown: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def counters(self) -> CacheCounters:
        return self.frames.counters

    @property
    def format(self) -> RowFormat:
        return self.frames.storage.rows.format

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.frames.indices.global_end_index,) * self.frames.spec.batch

    @property
    def num_bytes(self) -> int:
        return self.frames.num_bytes

    def extend(self, num_tokens: Sequence[int]) -> None:
        """As the interface says; equal counts, each a whole number of frames.

        Raises:
            UnsupportedError: they are not.
        """
        spec = self.frames.spec
        new = num_tokens[0] if num_tokens else 0
        if tuple(num_tokens) != (new,) * spec.batch or new % spec.frame_tokens:
            raise UnsupportedError(
                f"extend: got {tuple(num_tokens)}, a stream's cache takes {spec.batch} equal "
                f"counts of whole frames of {spec.frame_tokens} tokens; use a contiguous cache"
            )
        start = self.frames.indices.global_end_index // spec.frame_tokens
        self._open = self.frames.window(start_frame=start, num_frames=new // spec.frame_tokens)
        self._shown = {}

    def append(self, layer: int, *planes: Tensor) -> None:
        if len(planes) != 2:
            raise CacheError(f"got {len(planes)} planes, the cache has 2")
        self._shown[layer] = self.frames.update(layer, self._window(), *planes)

    def view(self, layer: int) -> tuple[Tensor, ...]:
        """As the interface says; the span's rows are shown exact, cached rows as their codec has
        them."""
        if layer in self._shown:
            return self._shown[layer]
        return self.frames.cached(layer)

    def positions(self, layer: int) -> Tensor:
        window = self._open if layer in self._shown else None
        return self.frames.positions(window).expand(self.frames.spec.batch, -1)

    def advance(self) -> None:
        self.frames.advance(self._window())
        self._shown = {}

    def keep(self, layer: int, rows_BK: Tensor) -> None:
        raise UnsupportedError("keep: a stream's cache evicts by its own policy; use h2o or ring")

    def truncate(self, lengths: Sequence[int]) -> None:
        """As the interface says; only to where it stands, or to nothing."""
        if tuple(lengths) == self.lengths:
            return
        if any(lengths):
            raise UnsupportedError(
                "truncate: slots were overwritten in place, so only nothing (0) can be gone back "
                "to; use a contiguous or paged sequence cache"
            )
        self.reset()

    def fork(self) -> None:
        raise UnsupportedError(
            "fork: slots are overwritten in place, so nothing could be restored; use a "
            "contiguous or paged sequence cache"
        )

    def commit(self) -> None:
        raise UnsupportedError("commit: there is no fork here")

    def discard(self) -> None:
        raise UnsupportedError("discard: there is no fork here")

    def reset(self) -> None:
        self.frames.reset()
        self._open, self._shown = None, {}

    def digest(self) -> str:
        return self.frames.digest()

    def _window(self) -> WriteWindow:
        """Of the span that was opened last; the cache itself refuses it once it has advanced."""
        if self._open is None:
            raise CacheError("no span was ever opened; call extend first")
        return self._open
