"""PyTorch alone owns its groups: where it lets go of one, the group's own threads end with it.

Gloo has no call that ends them. A thread that is late to drop the tensors of a collective needs
Python's lock for that, and Python ends a process by SIGABRT where such a thread comes for the lock
while the interpreter ends: so nothing else in this process keeps a group alive.
"""

import traceback
import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from scope_contracts.errors import LinkError


class Group:
    """A group of PyTorch's, for as long as that has it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)

    def __call__(self) -> dist.ProcessGroup:
        """Of one call: do not keep it.

        Raises:
            LinkError: this rank has left the group.
        """
        group = self._group()
        if group is None:
            raise LinkError("this rank has left the group")
        return group

    @property
    def is_world(self) -> bool:
        """Whether PyTorch has it as the group of all ranks now."""
        return dist.is_initialized() and dist.group.WORLD is self._group()


def gloo_group(ranks: Sequence[int], *, rank: int, timeout: timedelta) -> Group | None:
    """A new group of `ranks`; None on others. Every rank calls it."""
    group = dist.new_group(list(ranks), timeout=timeout, backend="gloo")
    return Group(group) if rank in ranks else None


def release_frames(error: BaseException) -> None:
    """Forget what the calls that `error` has ended held: PyTorch's own hold the group."""
    traceback.clear_frames(error.__traceback__)
