"""Weights in use are the weights of the checkpoint, bit for bit, and stay so.

A checksum is the sum of a tensor's bits read as integers, modulo 2^64: cheap on any device, and the
sums of a tensor's shards add up to the sum of the whole. A single flipped bit always changes it.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from scope_contracts.errors import FingerprintError
from scope_rt.models.shards import is_sharded

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(weight: Tensor) -> int:
    """Sum of the bits of `weight`, read as integers of its element size, modulo 2^64."""
    bits = weight.detach().contiguous().view(_INTEGERS[weight.element_size()])
    return int(bits.sum(dtype=torch.int64)) % 2**64


class Fingerprint:
    """The checksums of a rank's weights as they were loaded."""

    def __init__(self, model: nn.Module) -> None:
        self._weights = dict(model.named_parameters())
        self.checksums: Mapping[str, int] = {
            name: checksum(weight) for name, weight in self._weights.items()
        }

    def check(self, where: str) -> None:
        """Compare what is in memory now.

        Raises:
            FingerprintError: a weight changed since it was loaded.
        """
        for name, weight in self._weights.items():
            if checksum(weight) != self.checksums[name]:
                raise FingerprintError(f"{where}: weight {name} is not what was loaded")


def check_shards(by_rank: Mapping[int, Mapping[str, int]], whole: Mapping[str, int]) -> None:
    """Compare what all generator ranks loaded with the `whole` checkpoint, in the dtype of use.

    The parts of a sharded weight add up to the whole; of the others each rank holds all.

    Raises:
        FingerprintError: naming the weight, and the rank where one alone is off.
    """
    for name, want in whole.items():
        if is_sharded(name):
            if sum(sums[name] for sums in by_rank.values()) % 2**64 != want:
                raise FingerprintError(
                    f"weight {name}: the shards of ranks {sorted(by_rank)} do not add up to the "
                    "checkpoint"
                )
            continue
        for rank, sums in by_rank.items():
            if sums[name] != want:
                raise FingerprintError(f"rank {rank}: weight {name} is not the checkpoint's")
