"""How a model's cost grows with depth is measured, once: it is a property of model and machine."""

import time
from collections.abc import Callable, Sequence
from statistics import median

from scope_contracts.errors import UserInputError, mismatch
from scope_rt.lm.hierarchical.cost import CostModel, fitted
from scope_rt.lm.hierarchical.editing import EditableContext

_PROBES, _ROUNDS = 8, 5
"""Depths at which a chunk is timed, and how often."""


def calibrate(
    context: EditableContext,
    tokens: Sequence[int],
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> CostModel:
    """Append `tokens`, then fit what a leaf costs at which depth; the context adopts the result.

    Once for a model, its windows and a machine, on an empty context. Depths are timed in turns, so
    that a machine that becomes busy is not taken for a deeper context.

    Raises:
        UserInputError: there are fewer than two full chunks; nothing was changed.
    """
    chunk = context.chunk_leaves
    leaves = context.context.num_leaves + len(tokens)
    if leaves < 2 * chunk:
        want = f"at least {2 * chunk}, two chunks"
        raise UserInputError(mismatch("leaves to calibrate with", got=leaves, want=want))
    context.append(tokens)
    last = context.context.num_leaves // chunk - 1
    starts = sorted({last * probe // (_PROBES - 1) * chunk for probe in range(_PROBES)})
    seconds: dict[int, list[float]] = {start: [] for start in starts}
    for _ in range(_ROUNDS):
        for start in starts:
            seconds[start].append(context.time_chunk(start, clock))
    depths = [start + chunk / 2 for start in starts]
    context.cost = fitted(depths, [median(seconds[start]) / chunk for start in starts])
    return context.cost
