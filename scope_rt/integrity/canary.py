"""A fixed chunk gives the same bits whenever and wherever it is computed, or something has changed.

It has its own small cache, noise and text, so the stream's own are left alone; it uses the model,
backend, schedule and collectives of the stream. What changed since the first run may be anything a
chunk goes through: weights, kernels and their flags, the device, the sums of ranks.
"""

from dataclasses import replace

import torch
from torch import Tensor

from scope_contracts.cache_spec import CacheKind
from scope_contracts.envelope import CONDITIONING_EMBEDS, LATENTS_IN
from scope_contracts.row_format import CodecKind
from scope_rt.kv_cache.factory import open_frame_cache
from scope_rt.models.generator import ChunkGenerator
from scope_rt.models.lone_chunk import lone_envelope
from scope_rt.models.noise import SeededNoise
from scope_rt.tensors import digest_of

ROTATIONS = 8
"""Of the state, from one run to the next: 256 chunks by default."""
_SEED = 0x5C0FE
_FRAMES, _SIDE, _TEXT_LENGTH = 2, 4, 4
"""Latent frames of a chunk, latent cells along its side, and tokens of its text."""
_TOKENS = (_SIDE // 2) ** 2
_BIASES = (1.0, 0.5)
"""Of its two chunks: the second attends to the first, which weighs less."""


class Canary:
    """Two chunks of 8 tokens, one generator call each, through this rank's model.

    Its cache holds keys and values of 16 tokens: 32 numbers for each of the `num_layers * dim / tp`
    channels on this rank, 144 KiB in all for the embedded model in float32 (`num_bytes`). All ranks
    of a group run it before the same chunk: it has the all-reduces of two calls and of the text.
    """

    def __init__(self, generator: ChunkGenerator, *, every: int) -> None:
        """`every` is the number of chunks from one run to the next."""
        self._generator, self._every = generator, every
        spec = replace(
            generator.cache.spec,
            frame_tokens=_TOKENS,
            sink_frames=0,
            window_frames=2 * _FRAMES,
            batch=1,
            block_frames=_FRAMES,
            kind=CacheKind.RING,
            codec=CodecKind.IDENTITY,
        )
        self._cache = open_frame_cache(
            spec, device=generator.cache.device, group=generator.model.group
        )
        self.expected = ""
        """Digest of the first run; hand in an earlier start's, to be held against that."""
        self.digest = ""
        """Of the latest run."""

    @property
    def num_bytes(self) -> int:
        return self._cache.num_bytes

    def is_due(self, chunk: int) -> bool:
        """Whether to run before `chunk`: the first one here, and each that `every` divides."""
        return not self.digest or chunk % self._every == 0

    def run(self) -> str:
        """Compute the two chunks, and return the digest of what came out.

        Hand the digests of all ranks to `Checks.canary`, with `expected`.
        """
        config, stream = self._generator.model.config, self._generator
        fresh = ChunkGenerator(
            model=stream.model,
            cache=self._cache,
            schedule=stream.schedule,
            backend=stream.backend,
            noise=SeededNoise(),
        )
        drawn = torch.Generator().manual_seed(_SEED)
        text = torch.randn(1, _TEXT_LENGTH, config.text_dim, generator=drawn)
        out: list[Tensor] = []
        for chunk, bias in enumerate(_BIASES):
            shape = (1, _FRAMES, config.in_channels, _SIDE, _SIDE)
            tensors = {LATENTS_IN: torch.randn(shape, generator=drawn)}
            if chunk == 0:
                tensors[CONDITIONING_EMBEDS] = text
            envelope = lone_envelope(
                chunk,
                (1000.0,),
                frames_per_block=_FRAMES,
                height=8 * _SIDE,
                width=8 * _SIDE,
                clean_pass=False,
                bias=bias,
                seed=_SEED,
            )
            out.append(fresh.generate(envelope, tensors, _count_nothing).cpu())
        self.digest = digest_of(torch.cat(out))
        self.expected = self.expected or self.digest
        return self.digest


def _count_nothing() -> None:
    """Calls of a canary are in no chunk's budget."""
