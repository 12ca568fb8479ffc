"""What each entry of a recipe may be, by itself."""

from collections.abc import Callable, Mapping
from enum import StrEnum
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from scope_rt.models.recipe_choices import (
    CacheUpkeep,
    NewText,
    Positions,
    RecomputeText,
    TransitionWeights,
)


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _are_steps(value: object) -> bool:
    if not isinstance(value, list) or not value or not all(map(_is_number, value)):
        return False
    is_falling = all(later < earlier for earlier, later in pairwise(value))
    return is_falling and value[0] <= 1000 and value[-1] >= 0


def _whole(least: int) -> tuple[Callable[[Any], bool], str]:
    return (lambda value: type(value) is int and value >= least), f"a whole number from {least}"


_CHOICES: Mapping[str, type[StrEnum]] = MappingProxyType(
    {
        "cache_upkeep": CacheUpkeep,
        "positions": Positions,
        "new_text": NewText,
        "recompute_text": RecomputeText,
        "transition_weights": TransitionWeights,
    }
)
_ENTRIES: Mapping[str, tuple[Callable[[Any], bool], str]] = MappingProxyType(
    {
        "denoising_steps": (_are_steps, "a list of numbers, falling, within 1000 to 0"),
        "shift": (
            lambda value: _is_number(value) and 0 < value <= 1000,
            "a number above 0 and at most 1000",
        ),
        "frames_per_block": _whole(1),
        "window_frames": _whole(1),
        "sink_frames": _whole(0),
        "fps": _whole(1),
        "default_height": _whole(1),
        "default_width": _whole(1),
        "kv_cache_num_frames": _whole(0),
        "warp_steps": (lambda value: type(value) is bool, "true or false"),
        "start_frame": (lambda value: type(value) is bool, "true or false"),
        "first_chunk_steps": (
            lambda value: value == [] or _are_steps(value),
            "a list as of denoising_steps, or an empty one",
        ),
        "kv_cache_attention_bias": (
            lambda value: _is_number(value) and 0 < value <= 1,
            "a number above 0 and at most 1",
        ),
        "rollout_frames": _whole(0),
        "rollout_overlap": _whole(0),
        "latent_limit": (
            lambda value: value is None or (_is_number(value) and value > 0),
            "a number above 0, or null",
        ),
    }
)
_FLOATS = frozenset({"shift", "kv_cache_attention_bias"})
OPTIONAL = frozenset(
    {
        "first_chunk_steps",
        "kv_cache_attention_bias",
        "latent_limit",
        "new_text",
        "positions",
        "recompute_text",
        "rollout_frames",
        "rollout_overlap",
        "start_frame",
        "transition_weights",
    }
)


def checked(name: str, value: Any) -> Any:
    """The value of a file's entry as a recipe has it; raises ValueError for one that may not be."""
    if (kind := _CHOICES.get(name)) is not None:
        if value not in list(kind):
            raise ValueError(f"{name} is {value!r}, want {' or '.join(kind)}")
        return kind(value)
    fits, want = _ENTRIES[name]
    if not fits(value):
        raise ValueError(f"{name} is {value!r}, want {want}")
    if isinstance(value, list):
        return tuple(map(float, value))
    return float(value) if name in _FLOATS else value
