"""A weight's checksum tells whether it is, bit for bit, what it should be.

A checksum is the sum of a tensor's bits read as integers, modulo 2^64: cheap on any device, and the
sums of a tensor's shards add up to the sum of the whole. A single flipped bit always changes it.
"""

import torch
from torch import Tensor, nn

from scope_contracts.weights import Checksums

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CPU_PIECE = 1 << 18
"""Numbers that the CPU sums at a time: it makes a copy of them in 64 bits, which fits its cache."""


def checksum(weight: Tensor) -> int:
    """Sum of the bits of `weight`, read as integers of its element size, modulo 2^64."""
    bits = weight.detach().contiguous().view(_INTEGERS[weight.element_size()]).flatten()
    pieces = bits.split(_CPU_PIECE) if bits.device.type == "cpu" else (bits,)
    return int(torch.stack([piece.sum(dtype=torch.int64) for piece in pieces]).sum()) % 2**64


class Fingerprint:
    """The checksums of a rank's weights as they were loaded."""

    def __init__(self, model: nn.Module) -> None:
        self._weights = dict(model.named_parameters())
        self.checksums: Checksums = {name: self.now(name) for name in self._weights}

    def now(self, name: str) -> int:
        """The checksum of the weight `name` as it is in memory."""
        return checksum(self._weights[name])
