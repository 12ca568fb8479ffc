"""Rank0 shows what the codec makes of the latents, and its codec is the one that was loaded.

Chunks are decoded again, bit for bit, by a second decoder with a memory of its own: each one in
`strict`, one in `ROTATIONS` M by default, and each that shows one single value. What both would do
wrong alike is found elsewhere: weights of codec and text encoder are verified in rotation, all
within M chunks. What has no digest (code, kernels, their switches, a table that is no tensor of a
module) shows by what fixed latents, with each chunk that is decoded again, and the first prompt
give: what they always gave.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scope_contracts.integrity import IntegrityLevel, suspect_from
from scope_rt.checks import Checks
from scope_rt.integrity.canary import ROTATIONS
from scope_rt.integrity.rotation import Part, Rotation, parts_of
from scope_rt.tensor_digests import TensorDigests
from scope_rt.tensors import crc32_of, digest_of
from scope_rt.vae.codec import CodecSizes, StreamingDecoder
from scope_rt.values import is_constant

_SEED, _FIXED_FRAMES = 0x5C0FE, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RankZeroParts:
    """What rank0 makes pictures and embeddings with."""

    decoder: Callable[[], StreamingDecoder]
    """A new one, at the start of an epoch."""
    codec: CodecSizes
    pixel_multiple: int
    """Of which height and width must be multiples."""
    weights: TensorDigests
    encoded_again: Callable[[], tuple[str, str] | None]
    """Digests of a prompt's embeddings, encoded now and as it was first; None without a prompt."""


class PictureCheck:
    """Verifies each chunk between its decode and its consumer, on the thread that decodes."""

    def __init__(
        self, parts: RankZeroParts, *, level: IntegrityLevel, within: int, checks: Checks
    ) -> None:
        """Build it when the parts are loaded; decodes the fixed latents. `within` is M, in
        chunks."""
        self.is_strict = level is IntegrityLevel.STRICT
        self._parts, self._checks = parts, checks
        self._within = 1 if self.is_strict else within
        self._every = 1 if self.is_strict else ROTATIONS * within
        self._text_every = within if self.is_strict else self._every
        """New prompts are encoded twice, and in `strict` the first one with them."""
        self._rotation = Rotation(self._within)
        self._rotation.hold(parts_of(parts.weights))
        self._first_chunk: int | None = None
        """Of this process, which has loaded its parts itself."""
        self._text_verified_at = -1
        self._second: StreamingDecoder | None = None
        self._second_is_before = -1
        """The chunk that the second decoder can decode as it stands."""
        self._fixed = FixedLatents(parts)

    @property
    def num_frames_before(self) -> int:
        """Latent frames before a chunk that `verify` needs."""
        return self._parts.codec.decoder_context_frames

    def verify(
        self,
        chunk: int,
        latents_BFCHW: Tensor,
        frames_BTHWC: Tensor,
        *,
        before: Callable[[], Tensor | None],
    ) -> int | None:
        """Verify a chunk's frames, and the share of the weights that is due.

        `before` gives the `num_frames_before` latent frames of its epoch before it. Returns, in
        `strict`, the CRC-32 of the frames `[T, H, W, 3]`, taken before they are compared: what
        changes them from then on is seen here or by who compares it.

        Raises:
            FingerprintError, IntegrityError: naming the weight, or the chunk and what is wrong.
        """
        crc32 = crc32_of(frames_BTHWC[0].numpy()) if self.is_strict else None
        if self._first_chunk is None:
            self._first_chunk, self._text_verified_at = chunk, chunk - 1
            self._fixed.begin(chunk)
        if due := self._rotation.due():
            self._verify_weights(chunk, due)  # first: they are the cause
        if chunk % self._text_every == self._text_every // 2:
            self._verify_text(chunk)
        if chunk % self._every != self._every // 2 and not is_constant(frames_BTHWC):
            return crc32
        self._fixed.verify(chunk, self._checks)
        again = self._decoded_again(chunk, latents_BFCHW, before)
        # Turns follow from the chunk's index, so an earlier process had them too.
        with suspect_from(chunk + 1 - self._every):
            self._checks.decoded(chunk, frames_BTHWC, again)
        return crc32

    def close(self, chunk: int) -> None:
        """Verify all weights once more after the last chunk: no later one would.

        Raises:
            FingerprintError: naming the weight.
        """
        self._verify_weights(chunk, self._rotation.parts)

    def _verify_weights(self, chunk: int, due: Sequence[Part]) -> None:
        changed = self._parts.weights.changed(part.name for part in due)
        with suspect_from(max(chunk + 1 - self._within, self._first_chunk or 0)):
            self._checks.weights(0, chunk, changed)

    def _decoded_again(
        self, chunk: int, latents_BFCHW: Tensor, before: Callable[[], Tensor | None]
    ) -> Tensor:
        earlier = before()
        decoder = self._second
        if decoder is None or earlier is None or self._second_is_before != chunk:
            decoder = self._parts.decoder()
            if earlier is not None:
                decoder.decode(earlier.float())
        frames = decoder.decode(latents_BFCHW.float())
        # A decoder may hold gigabytes: by default it is wanted again long after.
        self._second, self._second_is_before = (decoder if self.is_strict else None), chunk + 1
        return frames

    def _verify_text(self, chunk: int) -> None:
        """Encode a prompt again."""
        if (digests := self._parts.encoded_again()) is not None:
            now, noted = digests
            with suspect_from(self._text_verified_at + 1):
                self._checks.text(
                    f"chunk {chunk}", "embeddings of the first prompt", now=now, noted=noted
                )
        self._text_verified_at = chunk


class FixedLatents:
    """A small picture that is decoded again and again, one latent frame after another."""

    def __init__(self, parts: RankZeroParts) -> None:
        """Decodes it; what it gives is right as it is now."""
        codec = parts.codec
        side = parts.pixel_multiple // codec.spatial_stride
        shape = (1, _FIXED_FRAMES, codec.latent_channels, side, side)
        latents = torch.randn(shape, generator=torch.Generator().manual_seed(_SEED))
        self._latents, self._decoder = latents.split(1, dim=1), parts.decoder()
        self._noted, self._verified_at = self._decoded(), -1

    def begin(self, chunk: int) -> None:
        """`chunk` is the first that is verified."""
        self._verified_at = chunk - 1

    def verify(self, chunk: int, checks: Checks) -> None:
        """Decode it again, and hold it against what it gave at first.

        Raises:
            IntegrityError: it changed.
        """
        now, noted = self._decoded(), self._noted
        with suspect_from(self._verified_at + 1):
            checks.codec(f"chunk {chunk}", "the picture of fixed latents", now=now, noted=noted)
        self._verified_at = chunk

    def _decoded(self) -> str:
        """Digest of its frames; the second one needs what the decoder remembers of the first."""
        self._decoder.reset()
        return digest_of(torch.cat([self._decoder.decode(each) for each in self._latents], dim=1))
