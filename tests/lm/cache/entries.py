"""Every cache that answers `KVCache`, small; a new one is a new line of `ENTRIES`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from scope_contracts.cache_spec import CacheKind, KVCacheSpec
from scope_contracts.row_format import CodecKind, RowFormat
from scope_contracts.tensor_spec import DType
from scope_rt.kv_cache.factory import open_frame_cache
from scope_rt.kv_cache.slot_cache import SlotCache
from scope_rt.lm.cache.contiguous import ContiguousCache
from scope_rt.lm.cache.indexer import indexer_format
from scope_rt.lm.cache.interface import KVCache
from scope_rt.lm.cache.layer_map import AttnLayerMap
from scope_rt.lm.cache.paged import PagedCache
from scope_rt.lm.hierarchical.cache import HierarchicalCache
from scope_rt.lm.hierarchical.hierarchy import Hierarchy
from scope_rt.tensors import TORCH_DTYPES
from tests.lm.cache.frame_rows import FrameRows
from tests.lm.cache.state_rows import NewestRow

CPU = torch.device("cpu")
BATCH, MAX_TOKENS, LAYERS = 3, 12, (1, 4)
SINK, STEP = 1, 2
BLOCK, WINDOW = 4, 3  # of paged caches
_HYBRID = AttnLayerMap(num_layers=6, attention_layers=LAYERS)


def all_of_it(start: int, end: int) -> set[int]:
    """Positions that a sequence shows after a span from `start` to `end`."""
    return set(range(end))


def sink_and_newest(start: int, end: int) -> set[int]:
    return {*range(min(SINK, end)), *range(max(0, end - MAX_TOKENS + SINK), end)}


def of_equals_the_older(start: int, end: int) -> set[int]:
    """What heavy hitters keep without scores: half of the past that is no chunk is the newest."""
    past = MAX_TOKENS - SINK - STEP
    if end <= SINK + past:
        return set(range(end))
    recent = past - past // 2
    return {*range(SINK + past - recent), *range(end - recent, end)}


def blocks_in_window(start: int, end: int) -> set[int]:
    """From the block on that the first token of the span sees."""
    first = max(0, start - WINDOW + 1) // BLOCK * BLOCK
    return set(range(first, end))


def newest(start: int, end: int) -> set[int]:
    return {end - 1} if end else set()


@dataclass(frozen=True, kw_only=True)
class Entry:
    """How to make a cache of `MAX_TOKENS` rows a sequence, and what it offers."""

    make: Callable[[], KVCache]
    layers: tuple[int, ...] = LAYERS
    batch: int = BATCH
    can_keep: bool = True
    can_truncate: bool = True
    can_fork: bool = True
    shows: Callable[[int, int], set[int]] = all_of_it
    """Positions that a sequence shows after a span from one length to another, if no call evicted
    any."""
    window: int | None = None
    """Tokens that a token sees; blocks before them are gone, and cannot be gone back to."""
    is_bounded: bool = True
    """Whether its rows run out; a state's do not, and it counts states in place of rows."""
    evicts: bool = False
    """Whether new rows take the place of old ones, so that there is always room; reading is then
    part of `append`."""
    step: int | None = None
    """Tokens of every span, where it takes no other."""
    summaries_evicted: int = 0
    """Of one layer and 16 tokens, beside rows."""

    def span(self, *num_tokens: int) -> list[int]:
        """Counts of a batch of three, for this batch; a cache that evicts takes equal ones."""
        first = self.step or num_tokens[0]
        return [first] * self.batch if self.evicts else list(num_tokens)[: self.batch]

    def rows(self, row_format: RowFormat, num_tokens: int, seed: int) -> tuple[torch.Tensor, ...]:
        """Random planes `[batch, num_tokens, heads, dim]`."""
        generator = torch.Generator().manual_seed(seed)
        dtype = TORCH_DTYPES[row_format.dtype]
        return tuple(
            torch.randn(
                self.batch, num_tokens, plane.heads, plane.dim, generator=generator, dtype=dtype
            )
            for plane in row_format.planes
        )


def full(codec: CodecKind) -> RowFormat:
    return RowFormat.full(heads=2, head_dim=16, value_dim=32, dtype=DType.FLOAT32, codec=codec)


def contiguous(row_format: RowFormat) -> Entry:
    return Entry(
        make=lambda: ContiguousCache(
            row_format, layers=_HYBRID, batch=BATCH, max_tokens=MAX_TOKENS, device=CPU
        )
    )


def paged(row_format: RowFormat, *, window: int | None = None) -> Entry:
    """As many blocks again as the sequences need, for what a fork holds on to."""
    return Entry(
        make=lambda: PagedCache.allocate(
            row_format,
            layers=_HYBRID,
            batch=BATCH,
            num_blocks=(2 if window is None else 4) * BATCH * MAX_TOKENS // BLOCK,
            block_size=BLOCK,
            device=CPU,
            max_tokens=MAX_TOKENS,
            windows=None if window is None else [window] * len(LAYERS),
        ),
        can_keep=False,
        shows=all_of_it if window is None else blocks_in_window,
        window=window,
    )


class WithoutGists(FrameRows):
    """A hierarchical stream of which only frames are shown: they lie before their summaries."""

    def view(self, layer: int) -> tuple[torch.Tensor, ...]:
        return tuple(plane[:, :MAX_TOKENS] for plane in super().view(layer))

    def positions(self, layer: int) -> torch.Tensor:
        return super().positions(layer)[:, :MAX_TOKENS]


def frames(
    kind: CacheKind,
    codec: CodecKind,
    *,
    adapter: type[FrameRows] = FrameRows,
    shows: Callable[[int, int], set[int]] = sink_and_newest,
    step: int | None = None,
    summaries_evicted: int = 0,
) -> Entry:
    """A stream's cache; frames of one token make it a cache of tokens.

    What it cannot do is refused by `FrameRows`, as that says: the cache has no such calls.
    """
    spec = KVCacheSpec(
        num_layers=2,
        num_heads=2,
        head_dim=16,
        frame_tokens=1,
        sink_frames=SINK,
        window_frames=MAX_TOKENS - SINK,
        batch=1,
        dtype=DType.FLOAT32,
        block_frames=step or 1,
        kind=kind,
        codec=codec,
    )

    def make() -> KVCache:
        cache = open_frame_cache(spec, device=CPU)
        assert isinstance(cache, SlotCache)
        return adapter(cache)

    return Entry(
        make=make,
        layers=(0, 1),
        batch=1,
        can_keep=False,
        can_truncate=False,
        can_fork=False,
        shows=shows,
        evicts=True,
        step=step,
        summaries_evicted=summaries_evicted,
    )


class Leaves(HierarchicalCache):
    """A hierarchical cache of which only the leaves are shown.

    It makes the summaries itself, from the last leaf and their index, and every view checks all.
    """

    def append(self, layer: int, *planes: torch.Tensor) -> None:
        made = torch.tensor([i for level in self.hierarchy.nodes(self.span)[1:] for i in level])
        with_summaries = []
        for plane in planes:
            summaries = plane[:, -1:].repeat_interleave(made.numel(), dim=1)
            summaries[..., 0] = made.view(-1, 1)
            with_summaries.append(torch.cat([plane, summaries], dim=1))
        super().append(layer, *with_summaries)
        self.counters.rows_written -= made.numel()

    def view(self, layer: int) -> tuple[torch.Tensor, ...]:
        leaves, *summaries = self._visible(layer)
        end = self.span.end if layer in self._written else self.span.start
        for store, count in zip(self.levels[1:], self.hierarchy.counts(end)[1:], strict=True):
            for plane in store.read(layer, slice(0, count)):
                assert (plane[0, :, :, 0] == torch.arange(count).view(-1, 1)).all()
        shown = super().view(layer)
        self.counters.rows_read -= sum(map(len, summaries))
        return tuple(plane[:, : len(leaves)] for plane in shown)

    def positions(self, layer: int) -> torch.Tensor:
        return super().positions(layer)[:, : len(self._visible(layer)[0])]


def hierarchical() -> Entry:
    """Groups of 2 in three levels, so that summaries come and go."""
    return Entry(
        make=lambda: Leaves(
            full(CodecKind.IDENTITY),
            Hierarchy(group=2, windows=(None, 2, None)),
            num_layers=2,
            max_leaves=MAX_TOKENS,
            device=CPU,
        ),
        layers=(0, 1),
        batch=1,
        can_keep=False,
    )


def state() -> Entry:
    """A state that is the newest token's row."""
    return Entry(
        make=lambda: NewestRow(full(CodecKind.IDENTITY), layers=LAYERS, batch=BATCH, device=CPU),
        can_keep=False,
        can_truncate=False,
        shows=newest,
        is_bounded=False,
    )


LATENT = RowFormat.latent(rank=16, rope_dim=8, dtype=DType.FLOAT64)
LOSSY = [codec for codec in CodecKind if codec is not CodecKind.IDENTITY]
ENTRIES = {
    **{f"contiguous {codec}": contiguous(full(codec)) for codec in CodecKind},
    "contiguous latent": contiguous(LATENT),
    "contiguous index keys": contiguous(indexer_format(dim=16, dtype=DType.FLOAT32)),
    "paged": paged(full(CodecKind.IDENTITY)),
    **{f"paged {codec}": paged(full(codec)) for codec in LOSSY},
    "paged latent": paged(LATENT),
    "paged windows": paged(full(CodecKind.IDENTITY), window=WINDOW),
    "ring": frames(CacheKind.RING, CodecKind.IDENTITY),
    **{f"ring {codec}": frames(CacheKind.QUANTIZED, codec) for codec in LOSSY},
    "paged frames": frames(CacheKind.PAGED, CodecKind.IDENTITY),
    "h2o frames": frames(CacheKind.H2O, CodecKind.IDENTITY, shows=of_equals_the_older, step=STEP),
    "hierarchical frames": frames(
        CacheKind.HIERARCHICAL,
        CodecKind.IDENTITY,
        adapter=WithoutGists,
        step=STEP,
        summaries_evicted=1,
    ),
    "hierarchical": hierarchical(),
    "state": state(),
}
