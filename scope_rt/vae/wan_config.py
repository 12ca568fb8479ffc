"""What Wan's VAE is, read from diffusers' `config.json` or off the shapes of the original file."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from math import isfinite
from pathlib import Path
from typing import Any, Self, TypeVar

from scope_contracts.errors import UserInputError, mismatch
from scope_rt.tensor_files.config_file import read_config
from scope_rt.tensor_files.fitting import TensorInFile
from scope_rt.vae.codec import CodecSizes

N = TypeVar("N", int, bool, float)
_FIX = "copy the folder of Wan 2.1's VAE again"
_CACHED_FRAMES = 2
"""Frames before its own that a causal convolution over three of them sees."""
_ALWAYS: Mapping[str, object] = {
    "attn_scales": [],
    "in_channels": 3,
    "is_residual": False,
    "out_channels": 3,
    "patch_size": None,
}
"""Entries of `config.json` that Wan 2.1's VAE may leave out, and no other model has so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WanVaeConfig:
    """Sizes under diffusers' names; mean and std are of the latents, one number a channel."""

    base_dim: int
    z_dim: int
    dim_mult: tuple[int, ...]
    num_res_blocks: int
    temperal_downsample: tuple[bool, ...]
    latents_mean: tuple[float, ...]
    latents_std: tuple[float, ...]

    @property
    def sizes(self) -> CodecSizes:
        return CodecSizes(
            latent_channels=self.z_dim,
            spatial_stride=2 ** len(self.temperal_downsample),
            temporal_stride=2 ** sum(self.temperal_downsample),
            first_latent_frames=1,
            decoder_context_frames=self._decoder_context_frames(),
        )

    def _decoder_context_frames(self) -> int:
        """How far back the first picture of a latent frame looks, in latent frames: 38 for Wan.

        From the pictures to the latents, counted in frames before the first one of the latent
        frame: a convolution over three frames adds two; what is n frames back was ceil(n / 2) back
        before the frames were doubled. Norms and attention work within a frame.
        """
        convolution, block = _CACHED_FRAMES, 2 * _CACHED_FRAMES
        back = convolution
        for doubles in (False, *self.temperal_downsample):  # what each stage ends with, last first
            if doubles:
                back = -(-back // 2) + convolution  # the one that doubles sees the frames before it
            back += (self.num_res_blocks + 1) * block
        middle = 2 * block
        return back + middle + convolution

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read `config.json` as diffusers writes it.

        Raises:
            UserInputError: it cannot be read, or is of another VAE; the sentence names the entry.
        """
        raw = read_config(path, fix=_FIX)
        for name, want in _ALWAYS.items():
            if (got := raw.get(name, want)) != want:
                raise UserInputError(mismatch(f"{path}: {name}", got=got, want=want, fix=_FIX))
        entries = _Entries(path, raw)
        base_dim, z_dim = entries.size("base_dim"), entries.size("z_dim")
        if (got := raw.get("decoder_base_dim")) not in (None, base_dim):
            name = f"{path}: decoder_base_dim"
            raise UserInputError(mismatch(name, got=got, want=base_dim, fix=_FIX))
        dim_mult = entries.several("dim_mult", int)
        latents_mean = entries.several("latents_mean", float, num=z_dim, because="z_dim")
        latents_std = entries.several("latents_std", float, num=z_dim, because="z_dim")
        if min(latents_std) <= 0:
            name, want = f"{path}: latents_std", "numbers above 0"
            raise UserInputError(mismatch(name, got=latents_std, want=want, fix=_FIX))
        return cls(
            base_dim=base_dim,
            z_dim=z_dim,
            dim_mult=dim_mult,
            num_res_blocks=entries.size("num_res_blocks"),
            temperal_downsample=entries.several(
                "temperal_downsample", bool, num=len(dim_mult) - 1, because="one less than dim_mult"
            ),
            latents_mean=latents_mean,
            latents_std=latents_std,
        )

    @classmethod
    def of_original(
        cls,
        path: Path,
        tensors: Mapping[str, TensorInFile],
        *,
        latents_mean: tuple[float, ...],
        latents_std: tuple[float, ...],
    ) -> Self:
        """Read the sizes of the original file off its shapes; no file states mean and std.

        Raises:
            UserInputError: it is another file, or of other latents than mean and std are.
        """

        def width_of(name: str) -> int:
            if name not in tensors or not tensors[name].shape:
                raise UserInputError(
                    f"{path} has no tensor {name}; give Wan's own file of its VAE, Wan2.1_VAE.pth"
                )
            return max(1, tensors[name].shape[0])

        base_dim, z_dim = width_of("encoder.conv1.weight"), width_of("conv2.weight")
        if z_dim != len(latents_mean):
            want = f"{len(latents_mean)} channels, as Wan's transformers make"
            raise UserInputError(
                mismatch(f"{path}: conv2.weight", got=z_dim, want=want, fix="give Wan2.1_VAE.pth")
            )
        widths, doubled, num_blocks = list[int](), list[bool](), 0
        for number in count():
            layer = f"encoder.downsamples.{number}"
            if (block := f"{layer}.residual.2.weight") in tensors:
                widths[len(doubled) :] = [width_of(block)]
                num_blocks += 1
            elif f"{layer}.resample.1.weight" in tensors:
                doubled.append(f"{layer}.time_conv.weight" in tensors)
            else:
                break
        return cls(
            base_dim=base_dim,
            z_dim=z_dim,
            dim_mult=tuple(width // base_dim for width in widths),
            num_res_blocks=num_blocks // max(1, len(widths)),
            temperal_downsample=tuple(doubled),
            latents_mean=latents_mean,
            latents_std=latents_std,
        )


@dataclass(frozen=True, slots=True)
class _Entries:
    """Entries of one `config.json`, each of the kind that is asked for."""

    path: Path
    raw: Mapping[str, Any]

    def size(self, name: str) -> int:
        got = self.raw.get(name)
        if type(got) is not int or got < 1:
            want = "a whole number from 1"
            raise UserInputError(mismatch(f"{self.path}: {name}", got=got, want=want, fix=_FIX))
        return got

    def several(
        self, name: str, kind: type[N], *, num: int | None = None, because: str = ""
    ) -> tuple[N, ...]:
        what, got = f"{self.path}: {name}", self.raw.get(name)
        kinds = (int, float) if kind is float else (kind,)
        if not isinstance(got, list) or not got or any(type(each) not in kinds for each in got):
            want = f"a list of {kind.__name__}"
            raise UserInputError(mismatch(what, got=got, want=want, fix=_FIX))
        if num is not None and len(got) != num:
            want = f"{num} entries, which is {because}"
            raise UserInputError(mismatch(what, got=len(got), want=want, fix=_FIX))
        if not all(map(isfinite, got)):
            raise UserInputError(mismatch(what, got=got, want="finite numbers", fix=_FIX))
        return tuple(map(kind, got))
