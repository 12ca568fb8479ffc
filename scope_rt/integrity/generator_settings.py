"""What a generator computes by that is no tensor: its schedule, its sizes, how its cache is kept.

No digest covers it, and what verifies arithmetic takes it from the same objects. So it is read
again wherever the process's numeric settings are.
"""

from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache
from operator import attrgetter

from scope_contracts.cache_spec import KVCacheSpec
from scope_rt.models.config import CausalWanConfig
from scope_rt.models.generator import ChunkGenerator
from scope_rt.models.schedule import FlowSchedule

_HELD = {"schedule": FlowSchedule, "model.config": CausalWanConfig, "cache.spec": KVCacheSpec}
_NAMES = (
    *(f"{where}.{field.name}" for where, kind in _HELD.items() for field in fields(kind)),
    *("recompute_text", "recaches", "positions"),
)
_values = attrgetter(*_NAMES)


def generator_settings(generator: ChunkGenerator) -> Callable[[], tuple[str, ...]]:
    """A function that gives `name=value` of each, as they are when it is called (1 µs)."""
    return lambda: _texts(_values(generator))


@lru_cache(maxsize=4)
def _texts(values: tuple[object, ...]) -> tuple[str, ...]:
    return tuple(f"{name}={value}" for name, value in zip(_NAMES, values, strict=True))
