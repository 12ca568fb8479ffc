"""A cache's peak is what it holds, and what it copies to show one layer: rows decoded or gathered.

The copies are measured, from the memory of what was shown. What a codec needs beside its result
while it decodes, and what a model makes of rows, are not a cache's.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from scope_contracts.cache_spec import KVCacheSpec
from scope_rt.kv_cache.factory import open_frame_cache
from scope_rt.kv_cache.row_store import RowStore
from scope_rt.kv_cache.slot_cache import SlotCache
from scope_rt.lm.cache.contiguous import ContiguousCache
from scope_rt.lm.cache.paged import PagedCache
from scope_rt.tensors import TORCH_DTYPES

RowsCache = ContiguousCache | PagedCache
_CPU = torch.device("cpu")


def copied_bytes(shown: Iterable[Tensor], own: Iterable[Tensor]) -> int:
    """Bytes of all memory behind `shown` that is not behind `own` as well, each piece once."""
    own_memory = {tensor.untyped_storage().data_ptr() for tensor in own}
    memory = {part.data_ptr(): part.nbytes() for part in (x.untyped_storage() for x in shown)}
    return sum(num_bytes for start, num_bytes in memory.items() if start not in own_memory)


def layer_copy_bytes(cache: RowsCache, layer: int) -> int:
    """What `cache` copies to show a layer as it stands; the view counts in its counters."""
    rows = cache.store.rows if isinstance(cache, PagedCache) else cache.store
    return copied_bytes(cache.view(layer), _memory(rows))


def peak_bytes(cache: RowsCache) -> int:
    """Of a cache as it stands: all it holds, and its largest copy of a layer."""
    layers = (cache.store if isinstance(cache, PagedCache) else cache).layers
    return cache.num_bytes + max(layer_copy_bytes(cache, n) for n in layers.attention_layers)


def stream_peak_bytes(spec: KVCacheSpec) -> int:
    """Of a video stream's cache on one rank, from a layer of that kind that is filled with zeros.

    All layers of a stream are alike.
    """
    cache = open_frame_cache(replace(spec, num_layers=1), device=_CPU)
    assert isinstance(cache, SlotCache), "every kind is one"
    tokens, dtype = spec.block_frames * spec.frame_tokens, TORCH_DTYPES[spec.dtype]
    chunk = torch.zeros((spec.batch, tokens, spec.num_heads, spec.head_dim), dtype=dtype)
    most = 0
    for start in range(0, 2 * spec.capacity_frames, spec.block_frames):
        window = cache.window(start_frame=start, num_frames=spec.block_frames)
        shown = cache.update(0, window, chunk, chunk)
        most = max(most, copied_bytes(shown, _memory(cache.storage.rows)))
        cache.advance(window)
    return spec.num_bytes(1) + most


def _memory(rows: RowStore) -> list[Tensor]:
    return [part for plane in rows.parts for part in plane]
