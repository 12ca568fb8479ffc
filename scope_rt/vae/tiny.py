"""The embedded codec: 4 frames are one latent frame, at an eighth of their size.

The encoder is one fixed linear projection without memory. The decoder sees the latent frame before
(zeros at the start of an epoch) and decodes one latent frame at a time, so that however a stream is
cut into chunks, the same kernels run on the same shapes and give the same bits.
"""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from einops import rearrange
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from scope_contracts.errors import UserInputError
from scope_rt.vae.codec import CodecSizes
from scope_rt.vae.pictures import to_bytes, to_video

WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"
FRAMES, STRIDE = 4, 8
SIZE_MULTIPLE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyCodecConfig:
    """Sizes of the codec."""

    latent_channels: int = 16
    wide_channels: int = 192
    narrow_channels: int = 32
    num_blocks: int = 2


class _Block(nn.Module):
    """Two convolutions beside a skip; the second starts at zero, so the block starts idle."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        nn.init.zeros_(self.second.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.silu(self.first(F.silu(x))))  # type: ignore[no-any-return]


class _Decoder(nn.Module):
    """Two neighbouring latent frames to four frames: a linear guess plus a learned correction."""

    def __init__(self, config: TinyCodecConfig) -> None:
        super().__init__()
        wide, narrow = config.wide_channels, config.narrow_channels
        self.guess = nn.ConvTranspose2d(config.latent_channels, 3 * FRAMES, STRIDE, STRIDE)
        self.enter = nn.Conv2d(2 * config.latent_channels, wide, 3, padding=1)
        self.blocks = nn.Sequential(*[_Block(wide) for _ in range(config.num_blocks)])
        self.to_quarter = nn.Conv2d(wide, 16 * narrow, 1)
        self.quarter = nn.Conv2d(narrow, narrow, 3, padding=1)
        self.to_full = nn.Conv2d(narrow, 4 * 3 * FRAMES, 3, padding=1)
        self.full = nn.Conv2d(6 * FRAMES, 3 * FRAMES, 3, padding=1)
        nn.init.zeros_(self.full.weight)

    def forward(self, latents_BCHW: Tensor, previous_BCHW: Tensor) -> Tensor:
        """Four frames as `[B, 4 * 3, 8 H, 8 W]`, not clamped."""
        guess = self.guess(latents_BCHW)
        x = self.blocks(self.enter(torch.cat([latents_BCHW, previous_BCHW], 1)))
        x = F.silu(F.pixel_shuffle(self.to_quarter(F.silu(x)), 4))
        x = F.silu(x + self.quarter(x))
        x = F.silu(F.pixel_shuffle(self.to_full(x), 2))
        return guess + self.full(torch.cat([x, guess], 1))  # type: ignore[no-any-return]


class TinyVideoCodec(nn.Module):
    """Video to latents and back, for heights and widths that are multiples of 16."""

    spatial_stride = STRIDE
    temporal_stride = FRAMES
    first_latent_frames = FRAMES
    decoder_context_frames = 1

    def __init__(self, config: TinyCodecConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = nn.Conv2d(3 * FRAMES, config.latent_channels, STRIDE, STRIDE)
        self.encoder.requires_grad_(False)
        self.decoder = _Decoder(config)

    @property
    def latent_channels(self) -> int:
        return self.config.latent_channels

    def encode(self, video_BTCHW: Tensor) -> Tensor:
        """Video in [-1, 1] to latents `[B, T/4, C, H/8, W/8]` of unit variance.

        Raises:
            UserInputError: T is not a multiple of 4, or H or W not a multiple of 16.
        """
        _, num_frames, _, height, width = video_BTCHW.shape
        if num_frames % FRAMES or height % SIZE_MULTIPLE or width % SIZE_MULTIPLE:
            raise UserInputError(
                f"video: got {num_frames} frames of {height}x{width}, want a multiple of {FRAMES} "
                f"frames and sizes that are multiples of {SIZE_MULTIPLE}; pad or crop the input"
            )
        packed = rearrange(video_BTCHW, "b (f t) c h w -> f b (t c) h w", t=FRAMES)
        return torch.stack([self.encoder(frame) for frame in packed], 1)

    def decode(self, latents_BFCHW: Tensor, previous_BCHW: Tensor | None = None) -> Tensor:
        """Latents to video `[B, 4 F, 3, 8 H, 8 W]` in [-1, 1].

        Args:
            previous_BCHW: the latent frame before the first; None at the start of an epoch.
        """
        if previous_BCHW is None:
            previous_BCHW = torch.zeros_like(latents_BFCHW[:, 0])
        packed = []
        for latents_BCHW in latents_BFCHW.unbind(1):
            packed.append(self.decoder(latents_BCHW.contiguous(), previous_BCHW.contiguous()))
            previous_BCHW = latents_BCHW
        video = torch.stack(packed, 1).clamp(-1, 1)
        return rearrange(video, "b f (t c) h w -> b (f t) c h w", t=FRAMES)

    def streaming_decoder(self) -> "TinyStreamingDecoder":
        return TinyStreamingDecoder(self)

    def streaming_encoder(self) -> "TinyStreamingEncoder":
        return TinyStreamingEncoder(self)

    @classmethod
    def sizes(cls, folder: Path) -> CodecSizes:
        """What `from_pretrained` would give, from `folder/config.json` alone.

        Raises:
            UserInputError: the file is not one that `save_pretrained` wrote.
        """
        try:
            config = _read_config(folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserInputError(
                f"cannot load a codec from {folder}: {str(error)[:200]!r}; point to a model folder"
            ) from error
        return CodecSizes(
            latent_channels=config.latent_channels,
            spatial_stride=cls.spatial_stride,
            temporal_stride=cls.temporal_stride,
            first_latent_frames=cls.first_latent_frames,
            decoder_context_frames=cls.decoder_context_frames,
        )

    @classmethod
    def from_pretrained(cls, folder: Path) -> Self:
        """Load `folder/config.json` and its weights, ready for use in fp32.

        Raises:
            UserInputError: the folder is not one that `save_pretrained` wrote.
        """
        try:
            codec = cls(_read_config(folder))
            weights = load_file(folder / WEIGHTS_NAME)
            codec.load_state_dict({name: weight.float() for name, weight in weights.items()})
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            raise UserInputError(
                f"cannot load a codec from {folder}: {str(error)[:200]!r}; point to a model folder"
            ) from error
        return codec.eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]

    def save_pretrained(self, folder: Path) -> None:
        """Write the folder that `from_pretrained` reads, in fp16; each file is replaced at once."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {"_class_name": type(self).__name__} | asdict(self.config)
        partial = folder / "config.json.partial"
        partial.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        partial.replace(folder / "config.json")
        halves = {name: w.detach().half().contiguous() for name, w in self.state_dict().items()}
        partial = folder / f"{WEIGHTS_NAME}.partial"
        save_file(halves, partial)
        partial.replace(folder / WEIGHTS_NAME)


def _read_config(folder: Path) -> TinyCodecConfig:
    raw = json.loads((folder / "config.json").read_text())
    return TinyCodecConfig(**{field.name: raw[field.name] for field in fields(TinyCodecConfig)})


class TinyStreamingDecoder:
    """Latents to uint8 frames; its whole state is the last latent frame."""

    def __init__(self, codec: TinyVideoCodec) -> None:
        self._codec = codec
        self._previous_BCHW: Tensor | None = None

    @torch.inference_mode()
    def decode(self, latents_BFCHW: Tensor) -> Tensor:
        """The next frames, uint8 `[B, 4 F, 8 H, 8 W, 3]`."""
        video = self._codec.decode(latents_BFCHW, self._previous_BCHW)
        self._previous_BCHW = latents_BFCHW[:, -1].clone()
        return rearrange(to_bytes(video), "b t c h w -> b t h w c").contiguous()

    def reset(self) -> None:
        """Forget the last latent frame: the next is the first of an epoch."""
        self._previous_BCHW = None


class TinyStreamingEncoder:
    """Uint8 frames to latents; without memory, so only whole groups of 4 frames are accepted."""

    def __init__(self, codec: TinyVideoCodec) -> None:
        self._codec = codec

    @torch.inference_mode()
    def encode(self, frames_BTHWC: Tensor) -> Tensor:
        """The next latents `[B, T/4, C, H/8, W/8]` of uint8 frames."""
        video = rearrange(to_video(frames_BTHWC), "b t h w c -> b t c h w")
        return self._codec.encode(video)

    def reset(self) -> None:
        """Nothing to forget."""
