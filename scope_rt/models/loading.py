"""A model folder becomes a model: diffusers-style parts, whole on disk, sliced per rank.

    model/recipe.json                how it is sampled and how its cache is kept
    model/transformer/               config.json + *.safetensors, diffusers or original Wan names
    model/vae/  model/text_encoder/  each with a config.json naming its class

Only this file decides which class a folder's parts become.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Self, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from scope_contracts.errors import UserInputError
from scope_contracts.geometry import ChunkGeometry
from scope_rt.collectives import Collectives
from scope_rt.models.causal_wan import CausalWanModel
from scope_rt.models.config import CausalWanConfig
from scope_rt.models.fingerprint import checksum
from scope_rt.models.original_names import to_diffusers
from scope_rt.models.recipe import Recipe
from scope_rt.models.shards import check_degree, shard
from scope_rt.tensors import NAMES
from scope_rt.text.words import WordTextEncoder
from scope_rt.vae.codec import VideoCodec
from scope_rt.vae.tiny import TinyVideoCodec

WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"
EMBEDDED = "tiny"
P = TypeVar("P")
CODECS: dict[str, Callable[[Path], VideoCodec]] = {
    TinyVideoCodec.__name__: TinyVideoCodec.from_pretrained,
}
TEXT_ENCODERS: dict[str, Callable[[Path], WordTextEncoder]] = {
    WordTextEncoder.__name__: WordTextEncoder.from_pretrained,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A model on disk: its recipe and sizes, read and checked; weights are loaded on demand."""

    path: Path
    recipe: Recipe
    config: CausalWanConfig

    @classmethod
    def open(cls, model: str | Path) -> Self:
        """Open a model folder, or the embedded model by the name "tiny".

        Raises:
            UserInputError: there is no such folder, or a part of it is missing or unknown.
        """
        path = embedded_folder() if model == EMBEDDED else Path(model)
        if not path.is_dir():
            raise UserInputError(
                f"model folder {str(model)!r} does not exist; give a folder, or {EMBEDDED!r} for "
                f"the embedded model"
            )
        config = CausalWanConfig.from_folder(path / "transformer")
        _check_weights(path / "transformer", config)
        return cls(path=path, recipe=Recipe.from_folder(path), config=config)

    def fingerprint(self) -> str:
        """SHA-256 over all files of the folder, so that ranks can tell they hold the same model."""
        digest = hashlib.sha256()
        for file in sorted(self.path.rglob("*")):
            if file.suffix in (".json", ".safetensors"):
                digest.update(file.relative_to(self.path).as_posix().encode())
                with file.open("rb") as opened:
                    digest.update(hashlib.file_digest(opened, "sha256").digest())
        return digest.hexdigest()

    def transformer(
        self, group: Collectives, *, dtype: torch.dtype, device: torch.device
    ) -> CausalWanModel:
        """This rank's slices of the DiT, ready for inference."""
        return build_transformer(self.config, self._weights(), group, dtype=dtype, device=device)

    def checksums(self, dtype: torch.dtype) -> dict[str, int]:
        """The checksum of every whole weight, in the dtype of use."""
        return {name: checksum(weight.to(dtype)) for name, weight in self._weights().items()}

    def codec(self) -> VideoCodec:
        return _part(self.path / "vae", CODECS)

    def text_encoder(self) -> WordTextEncoder:
        return _part(self.path / "text_encoder", TEXT_ENCODERS)

    def geometry(
        self, *, codec: VideoCodec, text: WordTextEncoder, dtype: torch.dtype
    ) -> ChunkGeometry:
        """The shape of every tensor of a chunk of this model."""
        return ChunkGeometry(
            latent_channels=self.config.in_channels,
            frames_per_block=self.recipe.frames_per_block,
            spatial_stride=codec.spatial_stride,
            text_len=text.text_len,
            text_dim=self.config.text_dim,
            dtype=NAMES[dtype],
            context_frames=self.recipe.context_frames,
        )

    def _weights(self) -> dict[str, Tensor]:
        """All weights of the transformer, from one file or several, under diffusers' names."""
        weights: dict[str, Tensor] = {}
        for path in sorted((self.path / "transformer").glob("*.safetensors")):
            weights |= load_file(path)
        return to_diffusers(weights)


def _check_weights(folder: Path, config: CausalWanConfig) -> None:
    """Compare names and shapes on disk with what `config` needs; reads headers only.

    Raises:
        UserInputError: no file, an unreadable file, or weights of another model.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise UserInputError(f"{folder} has no .safetensors file; copy the weights there")
    shapes: dict[str, list[int]] = {}
    for path in paths:
        try:
            with safe_open(path, "pt") as file:
                shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise UserInputError(f"cannot read {path}: {error}; copy the file again") from error
    with torch.device("meta"):
        needed = {name: list(p.shape) for name, p in CausalWanModel(config).named_parameters()}
    have = to_diffusers(shapes)
    wrong = sorted(name for name in needed | have if needed.get(name) != have.get(name))
    if wrong:
        raise UserInputError(
            f"{folder}: {len(wrong)} weights do not fit config.json, {wrong[0]!r} first; "
            f"copy the folder again"
        )


def embedded_folder() -> Path:
    """Where the embedded model lies in the installed package."""
    return Path(str(files("scope_rt") / "assets" / EMBEDDED))


def build_transformer(
    config: CausalWanConfig,
    weights: Mapping[str, Tensor],
    group: Collectives,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> CausalWanModel:
    """A model that holds its rank's slices of whole `weights` (diffusers' names).

    Raises:
        UserInputError: the heads do not divide, or the weights are not this config's.
    """
    check_degree(config, group.size)
    with torch.device("meta"):
        model = CausalWanModel(config, group)
    slices = {name: w.to(device, dtype) for name, w in shard(weights, group).items()}
    try:
        model.load_state_dict(slices, assign=True)
    except RuntimeError as error:
        first = " ".join(str(error).split())[:300]
        raise UserInputError(f"the weights do not fit config.json: {first}") from error
    return model.requires_grad_(False).eval()


def save_transformer(config: CausalWanConfig, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write a diffusers-style transformer folder in fp16; the weights file is replaced at once."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config.to_json())
    halves = {name: w.detach().cpu().to(torch.float16).contiguous() for name, w in weights.items()}
    partial = folder / f"{WEIGHTS_NAME}.partial"
    save_file(halves, partial)
    partial.replace(folder / WEIGHTS_NAME)


def _part(folder: Path, classes: Mapping[str, Callable[[Path], P]]) -> P:
    """Load the part of a model whose class `folder/config.json` names."""
    path = folder / "config.json"
    try:
        name = json.loads(path.read_text())["_class_name"]
    except (OSError, ValueError, KeyError) as error:
        raise UserInputError(f"cannot read {path}: {error!r}; point to a model folder") from error
    if name not in classes:
        choices = ", ".join(classes)
        raise UserInputError(f"{path}: no loader for class {name!r}; supported: {choices}")
    return classes[name](folder)
