"""Memory that is used again and again: new memory is cold, which costs more than the work."""

import math

from torch import Tensor

WORKSPACE_BYTES = 64 << 20
"""Most that a part keeps; larger uses get memory of their own."""


class Workspace:
    """Two parts, each as much as its largest use so far; each use ends before the next begins."""

    def __init__(self) -> None:
        self._parts: list[Tensor | None] = [None, None]
        self._views: dict[tuple[int, tuple[int, ...]], Tensor] = {}

    def like(self, shape: tuple[int, ...], example: Tensor, part: int) -> Tensor:
        """Of that shape, and of the dtype and on the device of `example`; holds anything."""
        view = self._views.get((part, shape))
        if view is None:
            size, known = math.prod(shape), self._parts[part]
            if size * example.element_size() > WORKSPACE_BYTES:
                return example.new_empty(shape)
            if known is None or known.numel() < size:
                self._views.clear()
                known = self._parts[part] = example.new_empty(size)
            view = self._views[part, shape] = known[:size].view(shape)
        return view
