"""The views, biases and tensors that every backend is shown; not a test itself."""

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from scope_contracts.cache_spec import KVCacheSpec
from scope_contracts.tensor_spec import DType
from scope_rt.attention.backend import BACKENDS
from scope_rt.attention.key_bias import KeyBias, key_bias
from scope_rt.kv_cache.ring import plan_write

BLOCK, FRAME_TOKENS = 3, 11
"""Latent frames of a chunk, and tokens of a frame: no view is a multiple of 64 or 128 keys."""
BIASES = (1.0, 0.9, 0.3, 1e-6)
HEADS, HEAD_DIM = 4, 16
QKV = tuple[Tensor, Tensor, Tensor]


def view(*, sink: int, window: int, start: int) -> tuple[int, ...]:
    """Latent frame of each slot, as the ring holds them once the chunk at `start` is written."""
    spec = KVCacheSpec(
        num_layers=1,
        num_heads=HEADS,
        head_dim=HEAD_DIM,
        frame_tokens=FRAME_TOKENS,
        sink_frames=sink,
        window_frames=window,
        batch=1,
        dtype=DType.FLOAT32,
    )
    return plan_write(spec, start_frame=start, num_frames=BLOCK).frames_in_view


VIEWS = {
    "first chunk only": view(sink=0, window=9, start=0),
    "filling": view(sink=0, window=9, start=3),
    "full, chunk amid the ring": view(sink=0, window=9, start=12),
    "full, chunk across the end": view(sink=0, window=7, start=12),
    "sinks": view(sink=2, window=7, start=15),
}


def bias_of(frames: tuple[int, ...], bias: float) -> KeyBias | None:
    return key_bias(frames, num_current=BLOCK, frame_tokens=FRAME_TOKENS, bias=bias)


def qkv(
    num_keys: int, dtype: torch.dtype, device: str = "cpu", num_queries: int = BLOCK * FRAME_TOKENS
) -> QKV:
    """Random q, k and v in the layout of the ring: k and v are views of something longer."""
    g = torch.Generator().manual_seed(num_keys)
    q = torch.randn(2, num_queries, HEADS, HEAD_DIM, generator=g)
    k, v = (torch.randn(2, num_keys + 5, HEADS, HEAD_DIM, generator=g) for _ in range(2))
    q, k, v = (x.to(device, dtype) for x in (q, k, v))
    return q, k[:, :num_keys], v[:, :num_keys]


_NO_FLASH = "flash needs a CUDA device and pip install 'scope-rt[flash-attn]'"
EVERY_BACKEND = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            name == "flash" and (find_spec("flash_attn") is None or not torch.cuda.is_available()),
            reason=_NO_FLASH,
        ),
    )
    for name in BACKENDS
]
"""All names, so that a backend that is not tested here says why."""
EVERY_CPU_BACKEND = [
    param
    if param.values[0] != "flash"
    else pytest.param("flash", marks=pytest.mark.skip(_NO_FLASH))
    for param in EVERY_BACKEND
]
