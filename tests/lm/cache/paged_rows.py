"""A small store of blocks and caches on it, filled with seeded rows; not a test itself."""

from collections.abc import Sequence

import torch
from torch import Tensor

from scope_contracts.row_format import RowFormat
from scope_contracts.tensor_spec import DType
from scope_rt.lm.cache.block_key import SharingScope
from scope_rt.lm.cache.interface import KVCache
from scope_rt.lm.cache.layer_map import AttnLayerMap
from scope_rt.lm.cache.page_support import DENSE, PageSupport
from scope_rt.lm.cache.paged import PagedCache
from scope_rt.lm.cache.paged_store import PagedStore
from tests.tiny_models import CPU

FORMAT = RowFormat.full(heads=2, head_dim=4, value_dim=3, dtype=DType.FLOAT32)
LAYERS = AttnLayerMap(num_layers=3, attention_layers=(0, 2))
SCOPE = SharingScope(domain="cpp")


def store(
    *,
    num_blocks: int = 32,
    block_size: int = 4,
    row_format: RowFormat = FORMAT,
    windows: Sequence[int | None] | None = None,
    page_support: PageSupport = DENSE,
    in_place_only: bool = False,
) -> PagedStore:
    return PagedStore(
        row_format,
        layers=LAYERS,
        num_blocks=num_blocks,
        block_size=block_size,
        device=CPU,
        windows=windows,
        page_support=page_support,
        in_place_only=in_place_only,
    )


def empty(of: PagedStore, batch: int = 1) -> PagedCache:
    return PagedCache(of, [of.start() for _ in range(batch)])


def planes(batch: int, num_tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(batch, num_tokens, 2, 4, generator=generator)
    v = torch.randn(batch, num_tokens, 2, 3, generator=generator)
    return k, v


def feed(cache: KVCache, num_tokens: Sequence[int], seed: int) -> None:
    cache.extend(num_tokens)
    for layer in LAYERS.attention_layers:
        cache.append(layer, *planes(len(num_tokens), max(num_tokens), 10 * seed + layer))
    cache.advance()


def attend_by_table(cache: PagedCache, layer: int) -> list[Tensor]:
    """What a kernel with a block table reads, sequence by sequence."""
    pages = cache.pages(layer)
    plane = pages.planes[0]
    return [
        plane[table.long()].flatten(0, 1)[: int(length)]
        for table, length in zip(pages.block_table, pages.cache_seqlens, strict=True)
    ]


def publish(of: PagedStore, cache: PagedCache, tokens: Sequence[int]) -> None:
    of.publish(cache.sequences[0], of.keys(tokens, SCOPE))
