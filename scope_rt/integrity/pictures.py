"""Rank0 shows what the codec makes of the latents, and its codec is the one that was loaded.

Chunks are decoded again, bit for bit, by a second decoder with a memory of its own: each one in
`strict`, one in `ROTATIONS` M by default, and each that shows one single value. The second decoder
decodes along for as many chunks before its turn as a picture depends on, so that no chunk waits for
more than two decodes. What both would do wrong alike is found elsewhere: weights of the codec are
verified in rotation, all within M chunks, and with them the switches of PyTorch for the thread that
decodes. What has no digest (code, kernels, a table that is no tensor of a module) shows by what
fixed latents, with each chunk that is decoded again, and the first prompt give: what they always
gave.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from scope_contracts.integrity import IntegrityLevel, suspect_from
from scope_rt.checks import Checks
from scope_rt.integrity.canary import ROTATIONS
from scope_rt.integrity.rotation import Part, Rotation, parts_of
from scope_rt.numerics import numeric_settings
from scope_rt.tensor_digests import TensorDigests
from scope_rt.tensors import crc32_of, digest_of
from scope_rt.vae.codec import CodecSizes, StreamingDecoder
from scope_rt.values import is_constant

_SEED, _FIXED_FRAMES = 0x5C0FE, 2
_FAR = 4.0
"""About the largest number of a model's latents, whose usual size is 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankZeroParts:
    """What rank0 makes pictures and embeddings with."""

    decoder: Callable[[], StreamingDecoder]
    """A new one, at the start of an epoch."""
    codec: CodecSizes
    latent_size: tuple[int, int]
    """Rows and columns of a latent frame of the stream."""
    weights: TensorDigests
    """Of the codec; the text encoder's are verified when it is used (`EncodedPrompts`)."""
    encoded_again: Callable[[], tuple[str, str] | None]
    """Digests of a prompt's embeddings, encoded now and as it was first; None without a prompt."""


class PictureCheck:
    """Verifies each chunk between its decode and its consumer, on the thread that decodes."""

    def __init__(
        self, parts: RankZeroParts, *, level: IntegrityLevel, within: int, checks: Checks
    ) -> None:
        """Build it when the parts are loaded; decodes the fixed latents, `_FIXED_FRAMES` latent
        frames of the stream's size. `within` is M, in chunks."""
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
        self._second = SecondDecoder(parts)
        self._fixed = FixedLatents(parts)
        self._settings: tuple[str, ...] = ()
        """Of the thread that decodes, at its first chunk."""

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
            self._settings = _own_settings()
            self._fixed.begin(chunk)
        if due := self._rotation.due():
            self._verify_settings(chunk)  # first: they are the cause, and so are weights
            self._verify_weights(chunk, due)
        if chunk % self._text_every == self._text_every // 2:
            self._verify_text(chunk)
        chunks_to_turn = (self._every // 2 - chunk) % self._every
        if chunks_to_turn and not is_constant(frames_BTHWC):
            self._second.follow(chunk, latents_BFCHW, before, chunks_to_turn=chunks_to_turn)
            return crc32
        self._fixed.verify(chunk, self._checks)
        again = self._second.decode(chunk, latents_BFCHW, before)
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

    def _verify_settings(self, chunk: int) -> None:
        with self._held_since(chunk):
            self._checks.numerics(0, chunk, now=_own_settings(), at_start=self._settings)

    def _verify_weights(self, chunk: int, due: Sequence[Part]) -> None:
        changed = self._parts.weights.changed(part.name for part in due)
        with self._held_since(chunk):
            self._checks.weights(0, chunk, changed)

    def _held_since(self, chunk: int) -> AbstractContextManager[None]:
        """What is found in here speaks against the chunks since all that is held was verified."""
        return suspect_from(max(chunk + 1 - self._within, self._first_chunk or 0))

    def _verify_text(self, chunk: int) -> None:
        """Encode a prompt again."""
        if (digests := self._parts.encoded_again()) is not None:
            now, noted = digests
            with suspect_from(self._text_verified_at + 1):
                self._checks.text(
                    f"chunk {chunk}", "embeddings of the first prompt", now=now, noted=noted
                )
        self._text_verified_at = chunk


def _own_settings() -> tuple[str, ...]:
    """Of this thread; but attention kernels, which generating chooses for itself meanwhile."""
    return tuple(each for each in numeric_settings() if not each.startswith("sdp_"))


class SecondDecoder:
    """Decodes chunks as the first one must have; it has a memory only while it is about to."""

    def __init__(self, parts: RankZeroParts) -> None:
        self._parts = parts
        self._decoder: StreamingDecoder | None = None
        """It may hold gigabytes."""
        self._is_before = -1
        """The chunk that comes next for it."""
        self._num_lacking = 0
        """Latent frames that it must still see before it decodes as one that saw all."""

    def follow(
        self,
        chunk: int,
        latents_BFCHW: Tensor,
        before: Callable[[], Tensor | None],
        *,
        chunks_to_turn: int,
    ) -> None:
        """A chunk goes by that is not verified: see of it what the one whose turn comes shows."""
        num_context = self._parts.codec.decoder_context_frames
        num_shown = num_context - (chunks_to_turn - 1) * latents_BFCHW.shape[1]
        if num_shown <= 0:
            self._decoder = None
            return
        starts_epoch = before() is None
        if starts_epoch:
            self._begin(0)
        elif self._decoder is None or self._is_before != chunk:
            self._begin(num_context)
            latents_BFCHW = latents_BFCHW[:, -num_shown:]
        self._see(chunk, latents_BFCHW)

    def decode(
        self, chunk: int, latents_BFCHW: Tensor, before: Callable[[], Tensor | None]
    ) -> Tensor:
        """Its frames; what the decoder has not seen yet of the chunks before is decoded first."""
        earlier = before()
        is_ready = self._decoder is not None and self._is_before == chunk and not self._num_lacking
        if earlier is None or not is_ready:
            self._begin(0)
            if earlier is not None:
                self._see(chunk - 1, earlier)
        return self._see(chunk, latents_BFCHW)

    def _begin(self, num_lacking: int) -> None:
        self._decoder, self._num_lacking = self._parts.decoder(), num_lacking

    def _see(self, chunk: int, latents_BFCHW: Tensor) -> Tensor:
        assert self._decoder is not None, "it was begun"
        frames = self._decoder.decode(latents_BFCHW.float())
        self._is_before = chunk + 1
        self._num_lacking = max(0, self._num_lacking - latents_BFCHW.shape[1])
        return frames


class FixedLatents:
    """A picture as large as the stream's that is decoded again and again, one latent frame after
    another.

    Each place of a picture may be a kernel's own case, and each brightness one of the code's: it is
    quiet on one side and rough on the other, and goes from one end of the scale to the other.
    """

    def __init__(self, parts: RankZeroParts) -> None:
        """Decodes it; what it gives is right as it is now."""
        rows, columns = parts.latent_size
        drawn = torch.Generator().manual_seed(_SEED)
        shape = (1, _FIXED_FRAMES, parts.codec.latent_channels, rows, columns)
        signs = torch.randn(*shape[:3], 1, 1, generator=drawn).sign()
        slope = torch.linspace(-_FAR, _FAR, rows)[:, None] * signs
        latents = slope + torch.linspace(0, _FAR, columns) * torch.randn(shape, generator=drawn)
        self._latents, self._new_decoder = latents.split(1, dim=1), parts.decoder
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
        decoder = self._new_decoder()  # kept, its memory would be as large as the stream's
        return digest_of(torch.cat([decoder.decode(each) for each in self._latents], dim=1))
