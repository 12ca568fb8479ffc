"""A place in a tensor-parallel group, for what only loads; not a test itself."""

import torch
from torch import Tensor

CPU = torch.device("cpu")


class Group:
    """One place in a group in which nothing is ever summed."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        raise NotImplementedError
