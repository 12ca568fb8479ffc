"""What a rank holds that plans, encodes text and decodes: rank0, and in `tp_v0` every rank."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from scope_contracts.cache_spec import KVCacheSpec
from scope_contracts.errors import UserInputError
from scope_runners.plan_memory.model_size import WanSize
from scope_runners.plan_memory.plan import MemoryLine

DECODE = "decode workspace"
DECODED_AGAIN = "decoder memory, again"
_PIXELS_PER_TOKEN = 256
_PIXELS_PER_LATENT = 64
_FRAMES_PER_LATENT = 4
_CHUNKS_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSize:
    """What decoding needs, in numbers for every pixel of a picture."""

    memory: float
    """Kept by a streaming decoder from one latent frame to the next."""
    workspace: float
    """Needed beside that while it decodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSize:
    """Text encoder and autoencoder of a model, in weights."""

    text_encoder: int
    autoencoder: int
    codec: CodecSize | None
    """None where it is not known."""

    def lines(
        self, spec: KVCacheSpec, size: WanSize, text_len: int, *, verifies: bool
    ) -> Iterator[MemoryLine]:
        """Everything but the runtime."""
        width = spec.dtype.num_bytes
        for name, num_weights in (
            ("text encoder", self.text_encoder),
            ("autoencoder", self.autoencoder),
        ):
            yield MemoryLine(
                name=name,
                num_bytes=num_weights * width,
                because=f"{num_weights:,} weights of {width} B",
            )
        pixels = spec.batch * spec.frame_tokens * _PIXELS_PER_TOKEN
        yield from self._decoding(pixels, width)
        if verifies and self.codec is not None:
            again = _FRAMES_PER_LATENT * spec.block_frames * pixels * 3
            yield MemoryLine(
                name=DECODED_AGAIN,
                num_bytes=int(pixels * self.codec.memory * width) + again,
                because="to verify pictures: in strict always, by default one chunk in 256",
            )
        latents = spec.window_frames + 2 * _CHUNKS_IN_FLIGHT * spec.block_frames
        numbers = latents * size.in_channels * pixels // _PIXELS_PER_LATENT
        numbers += spec.batch * text_len * size.text_dim
        frames = _FRAMES_PER_LATENT * (spec.window_frames + spec.block_frames)
        yield MemoryLine(
            name="context and chunks",
            num_bytes=numbers * width + frames * pixels * 3,
            because=f"at most {latents} latent frames, {frames} frames and one prompt",
            is_estimate=True,
        )

    def _decoding(self, pixels: int, width: int) -> Iterator[MemoryLine]:
        if self.codec is None:
            yield MemoryLine(
                name=DECODE,
                num_bytes=0,
                because="not known for this codec",
                is_estimate=True,
                is_known=False,
            )
            return
        memory, workspace = self.codec.memory, self.codec.workspace
        yield MemoryLine(
            name="decoder memory",
            num_bytes=int(pixels * memory * width),
            because=f"{pixels:,} pixels x {memory:,g} numbers of {width} B",
        )
        yield MemoryLine(
            name=DECODE,
            num_bytes=int(pixels * workspace * width),
            because=f"{pixels:,} pixels x {workspace:,g} numbers of {width} B",
            is_estimate=True,
        )


def num_weights_in(part: Path) -> int:
    """Weights of a file, or of all files of a folder, from headers alone; one that several files
    have, as variants of one part, counts once.

    Raises:
        UserInputError: a file is none.
    """
    from scope_rt.tensor_files.listing import listing_of  # loads PyTorch, which presets need not

    listing = listing_of(part)
    for (name, _), why in listing.unreadable.items():
        if part.is_file() or name.endswith(".safetensors"):  # a user's own part may have others
            raise UserInputError(why)
    tensors = {name: form for state in listing.states for name, form in state.tensors.items()}
    return sum(prod(form.shape) for form in tensors.values())
