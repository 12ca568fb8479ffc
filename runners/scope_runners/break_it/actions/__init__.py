"""What a fault does, by name: from the value that passes its point to the one used in its place.

Ranks look actions up here, so that a plan of faults can travel as text.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from scope_runners.break_it.actions import computing, edges, frames, latents, rank0, runtime, state

_ALL = (runtime, state, computing, edges, frames, latents, rank0)
ACTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {name: action for module in _ALL for name, action in module.ACTIONS.items()}
)
"""Actions by name: from the value that passes its point to the one used in its place."""

RECALLING_ACTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {**runtime.RECALLING_ACTIONS, **latents.RECALLING_ACTIONS, **rank0.RECALLING_ACTIONS}
)
"""Actions that are also given what passed the same point the time before."""
