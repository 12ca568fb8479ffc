"""A digest of a tensor's bits that depends on where each number stands, and adds up over shards.

Rows and columns have pseudo-random odd weights R and C of 64 bits. With u_rc the bits of a number,
read as an unsigned integer of at most 32 bits, the digest is

    sum over r, c of  R_r * C_c * u_rc   modulo 2^64

A single changed bit always changes it, because odd weights have inverses; a permutation, or changes
that keep the plain sum, go unnoticed once in 2^32 at most. Digests of a tensor's shards, each taken
at its place in the whole, add up to the digest of the whole. It finds damage, not forgery: whoever
knows the weights can find other bits of the same digest.
"""

from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = Any
"""On the CPU an array of unsigned words, elsewhere a tensor of signed ones of the same bits."""
MODULUS = 2**64
_ROWS, _COLUMNS = 0x9E37_79B9, 0x85EB_CA6B
"""Where the weights of rows and of columns begin in one pseudo-random sequence."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""What a number of so many bytes is read as; one of 8 is two words."""
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint32}
_MASKS = {1: 0xFF, 2: 0xFFFF, 4: 0xFFFF_FFFF, 8: -1}
_PIECE = 1 << 20
"""Words that a device turns into 64 bits at a time."""


def bit_digest(tensor: Tensor, *, first_row: int = 0, first_column: int = 0) -> int:
    """The digest of `tensor`, whose first axis counts rows and all others columns.

    It stands at `first_row` and `first_column` of the whole of which it is a shard. Blocks until
    the tensor's device has computed it.
    """
    num_rows = tensor.shape[0] if tensor.dim() else 1
    rows = tensor.reshape(num_rows, tensor.numel() // max(1, num_rows))
    digests = row_digests(rows, first_column)
    weights = _weights(tensor.device, _ROWS, first_row, num_rows)
    return int(weighed(digests, weights)) % MODULUS


def block_digests(blocks: Tensor) -> Words:
    """The digest of each block of rows `[..., rows, columns]` by itself, 64 bits, `[...]`.

    Blocks nothing on a device other than the CPU.
    """
    weights = _weights(blocks.device, _ROWS, 0, blocks.shape[-2])
    return weighed(row_digests(blocks), weights)


def row_digests(rows: Tensor, first_column: int = 0) -> Words:
    """The digest of each row `[..., columns]` by itself, 64 bits, `[...]`.

    Copies nothing where the numbers of a row lie together, and blocks nothing on a device other
    than the CPU.
    """
    words = _words_of(rows)
    words_a_number = words.shape[-1] // max(1, rows.shape[-1])
    first, count = first_column * words_a_number, words.shape[-1]
    return weighed(words, _weights(rows.device, _COLUMNS, first, count))


def _words_of(rows: Tensor) -> Words:
    """In the same memory."""
    size = rows.element_size()
    words = rows.detach().view(_WORDS[size])
    return words.numpy().view(_UNSIGNED[size]) if words.device.type == "cpu" else words


def weighed(words: Words, weights: Words) -> Words:
    """The sum of `words [..., count]` by their `weights [count]`, 64 bits, `[...]`."""
    if isinstance(words, np.ndarray):
        return np.einsum("...c,c->...", words, weights)  # without a copy in 64 bits
    flat_RC = words.reshape(-1, words.shape[-1])
    mask = torch.full((1,), _MASKS[words.element_size()], device=words.device)
    pieces = flat_RC.split(max(1, _PIECE // max(1, words.shape[-1])))
    sums = torch.cat([(piece & mask).mul_(weights).sum(1) for piece in pieces])
    return sums.view(words.shape[:-1])


def _weights(device: torch.device, sequence: int, first: int, count: int) -> Words:
    if device.type != "cpu":
        return _copied(device, sequence, first, count)
    return _pseudo_random(sequence, 1 << (first + count).bit_length())[first : first + count]


@lru_cache(maxsize=64)
def _copied(device: torch.device, sequence: int, first: int, count: int) -> Tensor:
    weights = _weights(torch.device("cpu"), sequence, first, count)
    return torch.from_numpy(weights.view(np.int64)).to(device)


@cache
def _pseudo_random(sequence: int, length: int) -> NDArray[np.uint64]:
    """Odd numbers: splitmix64 (Steele, Lea and Flood 2014), with the lowest bit set."""
    z = np.arange(sequence, sequence + length, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    numbers: NDArray[np.uint64] = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return numbers
