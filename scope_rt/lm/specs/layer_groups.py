"""Layers that keep the same rows share tables, and how many blocks a sequence takes is arithmetic.

Groups have one size, so that a block holds the rows of one group's layers and one pool serves all.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scope_contracts.errors import UserInputError, mismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that keep the same rows."""

    slots: tuple[int, ...]
    """Of the attention layers, counted from 0."""
    window: int | None

    def most_blocks(self, num_tokens: int, *, block_size: int, at_once: int) -> int:
        """Blocks that a sequence of `num_tokens` holds at most if it grows by up to `at_once`."""
        total = _blocks(num_tokens, block_size)
        if self.window is None:
            return total
        return min(total, _blocks(self.window - 1 + at_once, block_size) + 1)


def layer_groups(windows: Sequence[int | None]) -> tuple[LayerGroup, ...]:
    """Layers by window, in groups of one size: the greatest that divides every window's layers.

    Raises:
        UserInputError: a window shows nothing.
    """
    if any(window is not None and window < 1 for window in windows):
        raise UserInputError(mismatch("windows", got=tuple(windows), want="at least 1 token each"))
    by_window: dict[int | None, list[int]] = {}
    for slot, window in enumerate(windows):
        by_window.setdefault(window, []).append(slot)
    size = math.gcd(*map(len, by_window.values()))
    return tuple(
        LayerGroup(slots=tuple(slots[start : start + size]), window=window)
        for window, slots in by_window.items()
        for start in range(0, len(slots), size)
    )


def _blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)
