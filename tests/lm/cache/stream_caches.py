"""Every kind of cache that a stream can have, and chunks to run through it; not a test itself."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from scope_contracts.cache_spec import CacheChoice, KVCacheSpec
from scope_rt.collectives import Collectives
from scope_rt.kv_cache.factory import open_frame_cache
from scope_rt.kv_cache.slot_cache import SlotCache
from tests.tiny_models import BLOCK, CONFIG, CPU, cache_spec

KINDS = ["ring", "paged", "quantized:int8", "quantized:int4", "quantized:fp8", "h2o", "h2o:int8"]
LOSSY = [kind for kind in KINDS if ":" in kind]
HEADS, DIM = CONFIG.num_attention_heads, CONFIG.attention_head_dim


def spec_of(kind: str, *, sink: int = 1, window: int = 8) -> KVCacheSpec:
    choice = CacheChoice.named(kind)
    return replace(cache_spec(sink=sink, window=window), kind=choice.kind, codec=choice.codec)


def opened(spec: KVCacheSpec, group: Collectives | None = None) -> SlotCache:
    cache = open_frame_cache(spec, device=CPU, group=group)
    assert isinstance(cache, SlotCache)
    return cache


def rows(spec: KVCacheSpec, seed: int) -> Tensor:
    shape = (1, BLOCK * spec.frame_tokens, HEADS, DIM)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def run_chunk(cache: SlotCache, chunk: int, keys: Callable[[int], Tensor] | None = None) -> None:
    """One chunk whose queries are its keys."""
    window = cache.window(start_frame=BLOCK * chunk, num_frames=BLOCK)
    for layer in range(cache.spec.num_layers):
        k = rows(cache.spec, 10 * chunk + layer) if keys is None else keys(chunk)
        shown, _ = cache.update(layer, window, k, -k)
        if cache.spec.needs_attention_scores:
            cache.observe(layer, window, k, shown)
    cache.advance(window)
