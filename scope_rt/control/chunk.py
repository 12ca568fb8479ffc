"""A chunk says how it came to be: index, epoch, prompt, digest, calls and times travel with it."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from scope_contracts.envelope import PPEnvelope


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One emitted chunk: uint8 `frames` `[T, H, W, 3]` and how they came to be.

    `latents` are the generator's result `[F, C, H/8, W/8]`; `latents_sha256` is over their bytes.
    A video's writer still reads `frames`: do not change them.
    """

    chunk_index: int
    cache_epoch: int
    prompt: str
    frames: NDArray[np.uint8]
    latents: Tensor
    latents_sha256: str
    generator_calls: int
    recomputed: bool
    """Whether the cache was rebuilt from context before this chunk."""
    kv_cache_attention_bias: float
    stage_ms: dict[str, float]
    frames_crc32: int | None = None
    """Of `frames` as they were decoded, in `strict`: whoever keeps them for a while compares."""

    def __repr__(self) -> str:
        return (
            f"Chunk(chunk_index={self.chunk_index}, cache_epoch={self.cache_epoch}, "
            f"prompt={self.prompt!r}, frames={self.frames.dtype}{list(self.frames.shape)}, "
            f"latents={str(self.latents.dtype).removeprefix('torch.')}{list(self.latents.shape)}, "
            f"latents_sha256={self.latents_sha256[:12]}...)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrived:
    """A chunk's result `latents` `[B, F, C, H/8, W/8]`, checked, before it is decoded.

    `latents_sha256` is of the bytes that the generator ranks agreed on; it goes with the latents
    wherever they go.
    """

    envelope: PPEnvelope
    prompt: str
    latents: Tensor
    latents_sha256: str
    generator_calls: int
    stage_ms: dict[str, float]

    def shown(
        self, frames_BTHWC: Tensor, *, stage_ms: Mapping[str, float], crc32: int | None
    ) -> Chunk:
        """The chunk, with its decoded frames, their CRC-32 in `strict`, and what that took."""
        frames = frames_BTHWC[0].numpy()
        return Chunk(
            chunk_index=self.envelope.chunk_index,
            cache_epoch=self.envelope.cache_epoch,
            prompt=self.prompt,
            frames=frames,
            latents=self.latents[0],
            latents_sha256=self.latents_sha256,
            generator_calls=self.generator_calls,
            recomputed=self.envelope.do_kv_recompute,
            kv_cache_attention_bias=self.envelope.kv_cache_attention_bias,
            stage_ms={**self.stage_ms, **stage_ms},
            frames_crc32=crc32,
        )
