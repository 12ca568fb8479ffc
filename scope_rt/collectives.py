"""What a model may ask of its tensor-parallel group: sums, and nothing else.

Models and caches receive an object of this type, so `torch.distributed` stays in `scope_rt.mesh`.
"""

from typing import Protocol

from torch import Tensor


class Collectives(Protocol):
    """The tensor-parallel group as a model sees it."""

    @property
    def rank(self) -> int:
        """Position in the group, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks that share the heads (the TP degree)."""
        ...

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over the group, in place, and return it."""
        ...


class SoloCollectives:
    """A group of one."""

    rank = 0
    size = 1

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        return tensor
