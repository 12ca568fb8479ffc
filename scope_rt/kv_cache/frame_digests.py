"""Every frame of a tensor of rows is known by a digest of what was given for it.

Parts are `[L, B, T, heads, width]`, of T tokens in whole frames. On the CPU a digest is that of
`memory_digest`, taken by address, in loops of few steps: between two chunks code is cold, and a
step then takes as long as a frame of a small model. Elsewhere it is a sum, which stays on the
device.
"""

from collections import defaultdict
from collections.abc import Iterable
from ctypes import c_char
from typing import Protocol

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from scope_rt.bit_digest import block_digests
from scope_rt.kv_cache.row_store import Slots

Given = tuple[int, range, Tensor]
"""A layer, frame slots that lie together, and what they are to hold, `[B, T, heads, width]`."""


class FrameDigests(Protocol):
    """Of one part."""

    def note(self, writes: Iterable[Given]) -> None:
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
        _, self._batch, num_slots, heads, width = part.shape
        self._like = (part.shape, part.dtype)
        self._frame_tokens, self._token_bytes = frame_tokens, heads * width * part.itemsize
        self._frame_bytes = frame_tokens * self._token_bytes
        self._frame_at = (c_char * self._frame_bytes).from_address
        nothing = [[0] * (num_slots // frame_tokens)] * self._batch
        self._noted: dict[int, list[list[int]]] = defaultdict(lambda: [*map(list, nothing)])
        """By layer: of each batch row and frame slot."""

    def note(self, writes: Iterable[Given]) -> None:
        size = self._frame_bytes
        for layer, frames, given in writes:
            given, num = given.contiguous(), len(frames)
            at, num_bytes = given.data_ptr(), given.nbytes
            assert num_bytes == self._batch * num * size, "bytes are read by address"
            digests = self._digests(range(at, at + num_bytes, size))
            for row, noted in enumerate(self._noted[layer]):
                noted[frames.start : frames.stop] = digests[row * num : (row + 1) * num]

    def differing(
        self, part: Tensor, layers: range, frames: range, place: Slots
    ) -> list[tuple[int, int]]:
        if (part.shape, part.dtype) != self._like or part.device.type != "cpu":
            return [(layer, frame) for layer in layers for frame in frames]
        first_layer = layers.start
        if not isinstance(place, slice) or not part.is_contiguous():
            part = part[layers.start : layers.stop, :, place].contiguous()
            first_layer, place = 0, slice(0, part.shape[2])
        row_bytes, num_bytes = part.shape[2] * self._token_bytes, len(frames) * self._frame_bytes
        at = part.data_ptr() + first_layer * self._batch * row_bytes
        at += place.start * self._token_bytes
        assert first_layer + len(layers) <= part.shape[0], "bytes are read by address"
        assert place.start * self._token_bytes + num_bytes <= row_bytes, "as above"
        found = dict[tuple[int, int], None]()
        for layer in layers:
            for noted in self._noted[layer]:
                want = noted[frames.start : frames.stop]
                now = self._digests(range(at, at + num_bytes, self._frame_bytes))
                at += row_bytes
                if now != want:
                    pairs = zip(frames, now, want, strict=True)
                    found |= dict.fromkeys((layer, frame) for frame, a, b in pairs if a != b)
        return list(found)

    def _digests(self, places: range) -> list[int]:
        """Of frames at these addresses."""
        return [*map(xxh3_64_intdigest, map(self._frame_at, places))]


class _OnDevice:
    def __init__(self, part: Tensor, frame_tokens: int) -> None:
        self._tokens = frame_tokens
        self._noted_LBF = self._digests(part)

    def note(self, writes: Iterable[Given]) -> None:
        for layer, frames, given in writes:
            self._noted_LBF[layer, :, frames.start : frames.stop] = self._digests(given)

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
