"""Every cache that answers `KVCache`, small; a new one is a new line of `ENTRIES`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from scope_contracts.cache_spec import CacheKind, KVCacheSpec
from scope_contracts.row_format import CodecKind, RowFormat
from scope_contracts.tensor_spec import DType
from scope_rt.kv_cache.contiguous import ContiguousCache
from scope_rt.kv_cache.frame_rows import FrameRows
from scope_rt.kv_cache.hierarchical.cache import HierarchicalCache
from scope_rt.kv_cache.hierarchical.hierarchy import Hierarchy
from scope_rt.kv_cache.indexer import indexer_format
from scope_rt.kv_cache.interface import KVCache
from scope_rt.kv_cache.layer_map import AttnLayerMap
from scope_rt.kv_cache.paged import PagedCache
from scope_rt.kv_cache.slot_cache import SlotCache
from scope_rt.kv_cache.video import open_frame_cache
from scope_rt.tensors import TORCH_DTYPES

CPU = torch.device("cpu")
BATCH, MAX_TOKENS, LAYERS = 3, 12, (1, 4)
SINK = 1
_HYBRID = AttnLayerMap(num_layers=6, attention_layers=LAYERS)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """How to make a cache of `MAX_TOKENS` rows a sequence, and what it offers."""

    make: Callable[[], KVCache]
    layers: tuple[int, ...] = LAYERS
    batch: int = BATCH
    can_keep: bool = True
    can_go_back: bool = True
    """Whether it truncates and forks."""
    evicts: bool = False
    """Whether new rows take the place of old ones, beside `SINK` sinks, so that there is always
    room; reading is then part of `append`."""

    def span(self, *num_tokens: int) -> list[int]:
        """Counts of a batch of three, for this batch; a cache that evicts takes equal ones."""
        return [num_tokens[0]] * self.batch if self.evicts else list(num_tokens)[: self.batch]

    def visible(self, length: int) -> set[int]:
        """Positions that a sequence of `length` shows, if nobody else evicted any."""
        newest = range(max(SINK, length - (MAX_TOKENS - SINK)), length)
        return {*range(min(SINK, length)), *newest} if self.evicts else set(range(length))

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


def paged(row_format: RowFormat) -> Entry:
    """Blocks of 4; as many again as the sequences need, for what a fork holds on to."""
    return Entry(
        make=lambda: PagedCache.allocate(
            row_format,
            layers=_HYBRID,
            batch=BATCH,
            num_blocks=2 * BATCH * MAX_TOKENS // 4,
            block_size=4,
            device=CPU,
            max_tokens=MAX_TOKENS,
        ),
        can_keep=False,
    )


def frames(kind: CacheKind, codec: CodecKind) -> Entry:
    """A stream's cache; frames of one token make it a cache of tokens."""
    spec = KVCacheSpec(
        num_layers=2,
        num_heads=2,
        head_dim=16,
        frame_tokens=1,
        sink_frames=SINK,
        window_frames=MAX_TOKENS - SINK,
        batch=1,
        dtype=DType.FLOAT32,
        kind=kind,
        codec=codec,
    )

    def make() -> KVCache:
        cache = open_frame_cache(spec, device=CPU)
        assert isinstance(cache, SlotCache)
        return FrameRows(cache)

    return Entry(make=make, layers=(0, 1), batch=1, can_keep=False, can_go_back=False, evicts=True)


class Leaves(HierarchicalCache):
    """A hierarchical cache of which only the leaves are shown.

    It makes the summaries itself, from the last leaf and their index, which every view checks.
    """

    def append(self, layer: int, *planes: torch.Tensor) -> None:
        made, with_summaries = self._indices(self.hierarchy.nodes(self.span)), []
        for plane in planes:
            summaries = plane[:, -1:].repeat_interleave(made.numel(), dim=1)
            summaries[..., 0] = made.view(-1, 1)
            with_summaries.append(torch.cat([plane, summaries], dim=1))
        super().append(layer, *with_summaries)
        self.counters.rows_written -= made.numel()

    def view(self, layer: int) -> tuple[torch.Tensor, ...]:
        leaves, *_ = visible = self._visible(layer)
        made, shown = self._indices(visible), super().view(layer)
        for plane in shown:
            assert (plane[0, len(leaves) :, :, 0] == made.view(-1, 1)).all()
        self.counters.rows_read -= made.numel()
        return tuple(plane[:, : len(leaves)] for plane in shown)

    def positions(self, layer: int) -> torch.Tensor:
        return super().positions(layer)[:, : len(self._visible(layer)[0])]

    def _indices(self, nodes: tuple[range, ...]) -> torch.Tensor:
        return torch.tensor([index for level in nodes[1:] for index in level])


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


LATENT = RowFormat.latent(rank=16, rope_dim=8, dtype=DType.FLOAT64)
ENTRIES = {
    **{f"contiguous {codec}": contiguous(full(codec)) for codec in CodecKind},
    "contiguous latent": contiguous(LATENT),
    "contiguous index keys": contiguous(indexer_format(dim=16, dtype=DType.FLOAT32)),
    "paged": paged(full(CodecKind.IDENTITY)),
    "paged int8": paged(full(CodecKind.INT8)),
    "paged latent": paged(LATENT),
    "ring": frames(CacheKind.RING, CodecKind.IDENTITY),
    "ring int8": frames(CacheKind.QUANTIZED, CodecKind.INT8),
    "paged frames": frames(CacheKind.PAGED, CodecKind.IDENTITY),
    "hierarchical": hierarchical(),
}
