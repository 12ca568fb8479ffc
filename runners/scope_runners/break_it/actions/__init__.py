"""What a fault does, by name: from the value that passes its point to the one used in its place.

Ranks look actions up here, so that a plan of faults can travel as text.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from scope_runners.break_it.actions import computing, edges, latents, runtime, state

ACTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {**runtime.ACTIONS, **state.ACTIONS, **computing.ACTIONS, **edges.ACTIONS, **latents.ACTIONS}
)
"""Actions by name: from the value that passes its point to the one used in its place."""

RECALLING_ACTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {**runtime.RECALLING_ACTIONS, **latents.RECALLING_ACTIONS}
)
"""Actions that are also given what passed the same point the time before."""
