"""How the tokens of one generator call meet the cache: what they write, and what they attend to."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from scope_rt.attention.backend import AttentionBackend
from scope_rt.attention.key_bias import KeyBias
from scope_rt.kv_cache.frame_cache import FrameCache, WriteWindow
from scope_rt.models.rope import rotate


def ignore_rows(k_BKHD: Tensor, v_BKHD: Tensor) -> None:
    """Nobody watches what attention is shown."""


@dataclass(frozen=True, slots=True)
class TurnInWindow:
    """Rotates by the places of frames among those in view; keys are in the order of the slots."""

    queries: Tensor
    keys: Tensor

    def __call__(self, q_BTHD: Tensor, k_BKHD: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(q_BTHD, self.queries), rotate(k_BKHD, self.keys)


@dataclass(slots=True, kw_only=True)
class CachedSelfAttention:
    """Self-attention of one chunk: write its K/V into the cache, attend to all that is visible."""

    cache: FrameCache
    window: WriteWindow
    backend: AttentionBackend
    bias: KeyBias | None
    is_last: bool = False
    """Whether this is the chunk's last call: the cache keeps what it gives, and sees what it
    attends to."""
    turn: TurnInWindow | None = None
    """Rotates queries and keys that come without their positions."""
    see_rows: Callable[[Tensor, Tensor], None] = ignore_rows
    """Is shown all visible keys and values, as the cache gave them."""

    def __call__(self, layer: int, q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor) -> Tensor:
        k, v = self.cache.update(layer, self.window, k_BTHD, v_BTHD, is_last=self.is_last)
        self.see_rows(k, v)
        if self.turn is not None:
            q_BTHD, k = self.turn(q_BTHD, k)
        if self.is_last and self.cache.spec.needs_attention_scores:
            self.cache.observe(layer, self.window, q_BTHD, k)
        return self.backend.attend(q_BTHD, k, v, self.bias)


@dataclass(slots=True, kw_only=True)
class BlockCausalSelfAttention:
    """Self-attention of context frames: each block of them sees itself and the blocks before.

    The window starts at slot 0 of an empty cache, so that keys lie in the order of their frames.
    """

    cache: FrameCache
    window: WriteWindow
    backend: AttentionBackend
    block_tokens: int
    turn: TurnInWindow | None = None
    see_rows: Callable[[Tensor, Tensor], None] = ignore_rows

    def __call__(self, layer: int, q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor) -> Tensor:
        k, v = self.cache.update(layer, self.window, k_BTHD, v_BTHD)
        self.see_rows(k, v)
        if self.turn is not None:
            q_BTHD, k = self.turn(q_BTHD, k)
        ends = [*range(self.block_tokens, q_BTHD.shape[1], self.block_tokens), q_BTHD.shape[1]]
        blocks = q_BTHD.split(self.block_tokens, dim=1)
        parts = [
            self.backend.attend(q, k[:, :end], v[:, :end], None)
            for q, end in zip(blocks, ends, strict=True)
        ]
        return torch.cat(parts, dim=1)
