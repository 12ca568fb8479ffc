"""Randomness is a pure function of (seed, epoch, chunk, step), so any chunk can be made anywhere.

Numbers are drawn on the CPU in float32: every rank and every kind of device gets the same ones.
"""

import hashlib
import struct
from typing import Protocol

import torch
from torch import Tensor

INITIAL = 0
"""The step index of a chunk's starting noise; re-noise before step i uses i."""


class NoiseSource(Protocol):
    """Where a chunk's noise comes from; a recording may take the place of the generator."""

    def draw(
        self,
        *,
        base_seed: int,
        cache_epoch: int,
        chunk_index: int,
        step: int,
        shape: tuple[int, ...],
    ) -> Tensor:
        """Standard normal numbers of `shape`, float32, on the CPU."""
        ...


class SeededNoise:
    """Noise from a generator seeded by a hash of the four numbers."""

    def draw(
        self,
        *,
        base_seed: int,
        cache_epoch: int,
        chunk_index: int,
        step: int,
        shape: tuple[int, ...],
    ) -> Tensor:
        key = struct.pack("<4q", base_seed, cache_epoch, chunk_index, step)
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
