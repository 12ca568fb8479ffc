"""A digest by which a process knows again what it holds; it takes as long as reading it.

On the CPU that is XXH3 with 64 bits, of the package `xxhash` (Yann Collet's hash): a tenth of the
time of `bit_digest`, whose sums only files and shards need. Bytes are read by their address, for
steps from tensors to arrays would take longer than the bytes. What is on another device is summed
there, as in `bit_digest`, and does not leave it. A change of any kind goes unnoticed once in 2^64
on the CPU. It finds damage, not forgery, and is compared within one process only.
"""

from ctypes import c_char

import numpy as np
from torch import Tensor
from xxhash import xxh3_64_intdigest

from scope_rt.bit_digest import Words, bit_digest, block_digests


def memory_digest(tensor: Tensor) -> int:
    """The digest of `tensor`'s bits in C order, its dtype and its shape.

    Blocks until the tensor's device has computed it.
    """
    if tensor.device.type != "cpu":
        return bit_digest(tensor)
    tensor = tensor.contiguous()
    kind = hash((tensor.dtype, tensor.shape)) % 2**64
    return xxh3_64_intdigest((c_char * tensor.nbytes).from_address(tensor.data_ptr()), kind)


def frame_digests(rows: Tensor, frame_tokens: int) -> Words:
    """The digest of every frame of `rows [..., T, heads, width]`, `[..., F]`.

    Copies nothing where a frame's numbers lie together, and blocks nothing on a device other than
    the CPU.
    """
    if rows.device.type != "cpu":
        return block_digests(rows.flatten(-2).unflatten(-2, (-1, frame_tokens)))
    *outer, num_tokens, heads, width = rows.shape
    if rows.stride()[-3:] != (heads * width, width, 1):
        rows = rows.contiguous()
    token_bytes = heads * width * rows.itemsize
    frame = c_char * (frame_tokens * token_bytes)
    shape = (*outer, num_tokens // frame_tokens)
    steps = (*(stride * rows.itemsize for stride in rows.stride()[:-3]), frame_tokens * token_bytes)
    places = [rows.data_ptr()]
    for count, step in zip(shape, steps, strict=True):
        places = [place + i * step for place in places for i in range(count)]
    digests = [xxh3_64_intdigest(frame.from_address(place)) for place in places]
    return np.array(digests, np.uint64).reshape(shape)
