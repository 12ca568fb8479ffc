"""Cache systems by name, each as an empty cache that transformers' models take (None: their own).

Evicting ones keep a given number of rows a layer; the others keep every row and differ in how.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch

from scope_contracts.errors import UserInputError, mismatch
from scope_contracts.row_format import CodecKind
from scope_rt.kv_cache.policy import EvictionPolicy, HeavyHitters, RandomRows, sliding_window
from scope_rt.lm.cache.contiguous import ContiguousCache
from scope_rt.lm.cache.interface import KVCache
from scope_rt.lm.cache.paged import PagedCache
from scope_rt.lm.eviction import install_eviction_policy, remove_kv_eviction
from scope_rt.lm.model_cache import GenerateCache
from scope_rt.lm.model_rows import model_rows
from scope_rt.lm.specs.row_storage import BLOCK_SIZE, Evicting

FULL, PAGED, SLIDING, H2O_INT8 = "full", "paged", "sink + recent", "h2o, int8"
NUM_SINK = 2


def _halves(capacity: int) -> HeavyHitters:
    """Half of what the sinks leave is recent, as in the experiments of the H2O paper."""
    num_recent = (capacity - NUM_SINK) // 2
    budget = capacity - NUM_SINK - num_recent
    return HeavyHitters(budget=budget, num_sink=NUM_SINK, num_recent=num_recent)


EVICTING: Mapping[str, Callable[[int], EvictionPolicy]] = MappingProxyType(
    {
        "h2o": _halves,
        H2O_INT8: _halves,
        SLIDING: lambda rows: sliding_window(num_recent=rows - NUM_SINK, num_sink=NUM_SINK),
        "random": lambda rows: RandomRows(sizes=_halves(rows)),
    }
)
"""The policy that keeps so many rows."""
_STORING: Mapping[str, CodecKind] = MappingProxyType(
    {str(kind): kind for kind in (CodecKind.INT8, CodecKind.FP8, CodecKind.INT4)}
)
CODECS: Mapping[str, CodecKind] = MappingProxyType({**_STORING, H2O_INT8: CodecKind.INT8})
"""The codec of those that store rows in another than their own form."""
SYSTEMS = (FULL, *EVICTING, PAGED, *_STORING)


@contextmanager
def opened(
    model: Any, system: str, *, capacity: int | None, batch: int, length: int
) -> Iterator[Any]:
    """`past_key_values` for `batch` texts of `length` tokens; eviction leaves the model at the end.

    Raises:
        UserInputError: no such system, or no row beside the sinks.
    """
    if system in EVICTING:
        if capacity is None or capacity <= NUM_SINK:
            want = f"more than the {NUM_SINK} sinks"
            raise UserInputError(mismatch("rows a layer keeps", got=capacity, want=want))
        codec = CODECS.get(system, CodecKind.IDENTITY)
        install_eviction_policy(model, EVICTING[system](capacity), codec=codec)
        try:
            yield None
        finally:
            remove_kv_eviction(model)
    elif system == FULL:
        yield None
    else:
        cache = _storing(model, system, batch=batch, length=length)
        no_columns = torch.ones((batch, 0), dtype=torch.int64)
        num_layers = model.config.num_hidden_layers
        yield GenerateCache(cache, num_layers=num_layers, attention_mask=no_columns)


def _storing(model: Any, system: str, *, batch: int, length: int) -> KVCache:
    if system != PAGED and system not in CODECS:
        raise UserInputError(mismatch("system", got=system, want=f"one of {', '.join(SYSTEMS)}"))
    rows = model_rows(model, codec=CODECS.get(system, CodecKind.IDENTITY))
    if system == PAGED:
        return PagedCache.allocate(
            rows.row_format,
            layers=rows.layers,
            batch=batch,
            num_blocks=batch * -(-length // BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            device=model.device,
        )
    return ContiguousCache(
        rows.row_format, layers=rows.layers, batch=batch, max_tokens=length, device=model.device
    )


def bytes_per_token(model: Any, system: str) -> int:
    """Of one token in all layers, with scales, and with what eviction notes of a row."""
    rows = model_rows(model, codec=CODECS.get(system, CodecKind.IDENTITY))
    noted = Evicting.marks(rows.row_format.dtype) if system in EVICTING else 0
    return (rows.row_format.bytes_per_row + noted) * rows.layers.num_slots
