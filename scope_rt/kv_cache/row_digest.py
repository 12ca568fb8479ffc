"""Equal rows at equal positions give one digest, wherever and in which order a storage put them."""

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from scope_rt.tensors import digest_of


def row_digest(lengths: Sequence[int], layers: Iterable[tuple[Sequence[Tensor], Tensor]]) -> str:
    """BLAKE2b over every sequence's length, and every layer's planes `[B, K, heads, dim]` and
    positions `[B, K]`.

    Rows are taken in order of position; a position of -1 is padding and does not count.
    """
    digest = hashlib.blake2b(repr(tuple(lengths)).encode(), digest_size=16)
    for planes, positions_BK in layers:
        for sequence, positions_K in enumerate(positions_BK):
            order = torch.argsort(positions_K, stable=True)
            order = order[positions_K[order] >= 0]
            digest.update(digest_of(positions_K[order]).encode())
            for plane in planes:
                digest.update(digest_of(plane[sequence, order]).encode())
    return digest.hexdigest()


def state_digest(lengths: Sequence[int], layers: Iterable[Sequence[Tensor]]) -> str:
    """BLAKE2b over how many tokens went into each sequence's state, and every layer's tensors."""
    digest = hashlib.blake2b(repr(tuple(lengths)).encode(), digest_size=16)
    for parts in layers:
        for part in parts:
            digest.update(digest_of(part).encode())
    return digest.hexdigest()
