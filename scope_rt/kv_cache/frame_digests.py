"""Every frame of a tensor of rows is known by a digest of what was given for it.

Parts are `[L, B, T, heads, width]`, of T tokens in whole frames. On the CPU a digest is that of
`memory_digest`, taken by address: steps from tensors to arrays take longer than the bytes where the
code is cold, as it is between two chunks. Elsewhere it is a sum, which stays on the device.
"""

from collections.abc import Iterator
from ctypes import c_char
from typing import Protocol

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from scope_rt.bit_digest import block_digests
from scope_rt.kv_cache.row_store import Slots


class FrameDigests(Protocol):
    """Of one part."""

    def note(self, layer: int, frames: range, given_BTHW: Tensor) -> None:
        """Frame slots are to hold what is given. Blocks nothing on another device."""
        ...

    def differing(
        self, part: Tensor, layers: range, frames: range, place: Slots
    ) -> list[tuple[int, int]]:
        """Layers and frame slots of which `part` holds something else at `place` of its tokens.

        Blocks until they are read.
        """
        ...


def frame_digests_of(part: Tensor, frame_tokens: int) -> FrameDigests:
    """For a part like this one."""
    return (_OnHost if part.device.type == "cpu" else _OnDevice)(part, frame_tokens)


class _OnHost:
    def __init__(self, part: Tensor, frame_tokens: int) -> None:
        *_, heads, width = part.shape
        self._like, self._tokens = (part.shape, part.dtype), frame_tokens
        self._token_strides = (heads * width, width, 1)
        self._token_bytes = heads * width * part.itemsize
        self._frame = c_char * (frame_tokens * self._token_bytes)
        self._noted: dict[tuple[int, int, int], int] = {}
        """By layer, batch row and frame slot."""

    def note(self, layer: int, frames: range, given_BTHW: Tensor) -> None:
        given, noted = self._together(given_BTHW), self._noted
        batch, num_tokens, *_ = given.shape
        assert num_tokens == len(frames) * self._tokens, "bytes are read by address"
        batch_bytes = given.stride(0) * given.itemsize
        for row, frame, digest in self._digests(given.data_ptr(), batch, batch_bytes, frames):
            noted[layer, row, frame] = digest

    def differing(
        self, part: Tensor, layers: range, frames: range, place: Slots
    ) -> list[tuple[int, int]]:
        if (part.shape, part.dtype) != self._like or part.device.type != "cpu":
            return [(layer, frame) for layer in layers for frame in frames]
        part = part[layers.start : layers.stop]  # others may not be copied
        if not isinstance(place, slice):
            part, place = part[:, :, place], slice(0, len(place))
        part, noted, found = self._together(part), self._noted, dict[tuple[int, int], None]()
        num_layers, batch, num_tokens = part.shape[:3]
        end = place.start + len(frames) * self._tokens
        assert num_layers == len(layers), "bytes are read by address"
        assert end <= num_tokens, "bytes are read by address"
        layer_bytes, batch_bytes = part.stride()[:2]
        first = part.data_ptr() + place.start * self._token_bytes
        size = part.itemsize
        for number, layer in enumerate(layers):
            at = first + number * layer_bytes * size
            for row, frame, digest in self._digests(at, batch, batch_bytes * size, frames):
                if noted.get((layer, row, frame)) != digest:
                    found[layer, frame] = None
        return list(found)

    def _digests(
        self, at: int, batch: int, batch_bytes: int, frames: range
    ) -> Iterator[tuple[int, int, int]]:
        """Of frames that lie one after another from `at` on: batch row, frame slot and digest."""
        kind, size = self._frame, self._tokens * self._token_bytes
        for row in range(batch):
            place = at + row * batch_bytes
            for frame in frames:
                yield row, frame, xxh3_64_intdigest(kind.from_address(place))
                place += size

    def _together(self, rows: Tensor) -> Tensor:
        """Rows in which a frame's numbers lie together, copied where they do not."""
        return rows if rows.stride()[-3:] == self._token_strides else rows.contiguous()


class _OnDevice:
    def __init__(self, part: Tensor, frame_tokens: int) -> None:
        self._tokens = frame_tokens
        self._noted_LBF = self._digests(part)

    def note(self, layer: int, frames: range, given_BTHW: Tensor) -> None:
        self._noted_LBF[layer, :, frames.start : frames.stop] = self._digests(given_BTHW)

    def differing(
        self, part: Tensor, layers: range, frames: range, place: Slots
    ) -> list[tuple[int, int]]:
        at = slice(layers.start, layers.stop)
        noted_LBF = self._noted_LBF[at, :, frames.start : frames.stop]
        differs_LF = (self._digests(part[at, :, place]) != noted_LBF).any(1)
        return [(layers[layer], frames[frame]) for layer, frame in differs_LF.nonzero().tolist()]

    def _digests(self, rows: Tensor) -> Tensor:
        """Of `[..., T, heads, width]`, `[..., F]`."""
        return torch.as_tensor(block_digests(rows.flatten(-2).unflatten(-2, (-1, self._tokens))))
