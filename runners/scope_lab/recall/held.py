"""What a language model's cache takes is measured while attention runs, before rows are evicted."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from scope_lab.cache_peak import copied_bytes, layer_copy_bytes
from scope_rt.lm.cache.contiguous import ContiguousCache
from scope_rt.lm.cache.paged import PagedCache
from scope_rt.lm.eviction_layer import EvictingLayer
from scope_rt.lm.model_cache import GenerateCache


def cache_bytes(cache: Any) -> int:
    """What `past_key_values` holds, with what eviction notes: ours is allocated whole."""
    if isinstance(cache, GenerateCache):
        return cache.cache.num_bytes
    return sum(
        layer.num_bytes
        if isinstance(layer, EvictingLayer)
        else layer.keys.nbytes + layer.values.nbytes
        for layer in cache.layers
        if layer.is_initialized
    )


def shown_bytes(cache: Any, layer: int) -> int:
    """What `past_key_values` copied for the attention of a layer, beside what it holds."""
    if isinstance(cache, GenerateCache):
        assert isinstance(cache.cache, ContiguousCache | PagedCache), "as `systems` makes them"
        return layer_copy_bytes(cache.cache, layer)
    own = cache.layers[layer]
    if not isinstance(own, EvictingLayer) or own.rows is None:
        return 0
    return copied_bytes((own.keys, own.values), (*own.rows.keys, *own.rows.values))


@contextmanager
def bytes_held(model: Any) -> Iterator[list[int]]:
    """Bytes at each attention that runs in the block: all the cache holds, and what it copied for
    that layer.
    """
    held: list[int] = []

    def note(layer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: object) -> None:
        cache = kwargs["past_key_values"]
        held.append(cache_bytes(cache) + shown_bytes(cache, layer.layer_idx))

    hooks = [
        layer.self_attn.register_forward_hook(note, prepend=True, with_kwargs=True)
        for layer in model.model.layers
    ]
    try:
        yield held
    finally:
        for hook in hooks:
            hook.remove()
