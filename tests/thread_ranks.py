"""Ranks are threads of this process: a sum meets at a barrier, and is in order of rank on each."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

TIMEOUT_S = 30
T = TypeVar("T")


class _Group:
    """What the threads of one group share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self.parts: dict[int, Tensor] = {}


class ThreadCollectives:
    """One rank's `Collectives`."""

    def __init__(self, rank: int, group: _Group) -> None:
        self.rank, self.size, self._group, self.num_sums = rank, group.size, group, 0

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        self.num_sums += 1
        self._group.parts[self.rank] = tensor.clone()
        self._group.barrier.wait()
        total = torch.stack([self._group.parts[rank] for rank in range(self.size)]).sum(0)
        self._group.barrier.wait()
        return tensor.copy_(total)


def thread_ranks(size: int) -> list[ThreadCollectives]:
    """All ranks of a group."""
    group = _Group(size)
    return [ThreadCollectives(rank, group) for rank in range(size)]


def on_all_ranks(size: int, body: Callable[[int], T]) -> list[T]:
    """What `body(rank)` returns on each rank, all at once; raises what one of them raised."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(body, range(size), timeout=4 * TIMEOUT_S))
