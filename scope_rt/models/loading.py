"""A model folder becomes a model: diffusers-style parts, whole on disk, sliced per rank.

    model/recipe.json                how it is sampled and how its cache is kept
    model/transformer/               config.json + *.safetensors, diffusers or original Wan names
    model/vae/  model/text_encoder/  each with a config.json naming its class

`weight_files` reads the weights, `folder_contents` tells what is in the files, `registry` knows who
loads codec and text encoder.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import save_file
from torch import Tensor

from scope_contracts.errors import UserInputError, mismatch
from scope_contracts.geometry import ChunkGeometry
from scope_rt.collectives import Collectives
from scope_rt.models.causal_wan import CausalWanModel
from scope_rt.models.config import CausalWanConfig
from scope_rt.models.content_cache import ContentCache
from scope_rt.models.file_contents import model_files, read_file
from scope_rt.models.fingerprint import shard_digest
from scope_rt.models.folder_contents import FolderContents
from scope_rt.models.manifest import Manifest
from scope_rt.models.recipe import Recipe
from scope_rt.models.registry import CODECS, TEXT_ENCODERS
from scope_rt.models.shards import check_degree, shard_of, shards_of
from scope_rt.models.weight_files import WeightFiles
from scope_rt.tensor_files.fitting import check_fit
from scope_rt.tensor_files.stored_tensor import TensorReader
from scope_rt.tensors import NAMES
from scope_rt.text.encoder import TextEncoder, TextSizes
from scope_rt.vae.codec import CodecSizes, VideoCodec

WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"
EMBEDDED = "tiny"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A model on disk: its recipe and sizes, read and checked; weights are loaded on demand."""

    path: Path
    recipe: Recipe
    config: CausalWanConfig
    weights: WeightFiles
    contents: FolderContents
    manifest: Manifest | None

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
        weights = WeightFiles.open(path / "transformer")
        _check_weights(path / "transformer", weights, config)
        return cls(
            path=path,
            recipe=Recipe.from_folder(path),
            config=config,
            weights=weights,
            contents=FolderContents(path, weights, cache=ContentCache.of(path)),
            manifest=Manifest.read(path),
        )

    def fingerprint(self, dtype: torch.dtype | None = None) -> str:
        """SHA-256 over all files of the folder, so that ranks can tell they hold the same model.

        The first call on a machine reads the folder; later ones look at sizes and times only (see
        `folder_contents`). With the `dtype` of use, that read gives `checksums` as well.

        Raises:
            FingerprintError: a file is not what the folder's manifest says.
        """
        fingerprint = self.contents.fingerprint(dtype)
        if self.manifest is not None:
            self.manifest.check(self.path, self.contents.sha256s())
        return fingerprint

    def checksums(self, dtype: torch.dtype) -> dict[str, int]:
        """The checksum of every whole weight, in the dtype of use; kept as `fingerprint` is."""
        return self.contents.checksums(dtype)

    def stored_digests(self, dtype: torch.dtype) -> dict[str, int]:
        """What `digests_as_read` of all ranks' slices must add up to, by the same names.

        The manifest says it; without one, what was there when the folder was first read.
        """
        first_read = {} if self.manifest is not None else self.contents.stored_digests(dtype)
        digests = {}
        for path, tensors in self.weights.by_file():
            file = path.relative_to(self.path).as_posix()
            named = {} if self.manifest is None else self.manifest.files[file].tensors
            for name, tensor in tensors:
                digests[f"{file}/{name}"] = named[tensor.name] if named else first_read[name]
        return digests

    def transformer(
        self, group: Collectives, *, dtype: torch.dtype, device: torch.device
    ) -> CausalWanModel:
        """This rank's slices of the DiT, ready for inference.

        Reads the bytes of those slices and no others, each once; beside them the host holds one
        slice at a time.

        Raises:
            UserInputError: the heads do not divide, or a file cannot be read.
        """
        check_degree(self.config, group.size)
        slices, as_read = {}, {}
        for path, tensors in self.weights.by_file():
            file = path.relative_to(self.path).as_posix()
            with TensorReader(path) as reader:
                for name, tensor in tensors:
                    shard = shard_of(name, group)
                    part = reader.read(tensor, shard)
                    as_read[f"{file}/{name}"] = shard_digest(part, shard)
                    slices[name] = part.to(device, dtype)
        model = _with_slices(self.config, slices, group)
        model.digests_as_read = as_read
        return model

    def codec(self) -> VideoCodec:
        """Load the codec, for ranks that decode.

        Raises:
            UserInputError: it cannot be loaded.
            FingerprintError: its files are not what they were.
        """
        self._check_part("vae")
        return CODECS.load(self.path / "vae")

    def codec_sizes(self) -> CodecSizes:
        """What the codec will be, from its configuration alone. Raises UserInputError."""
        return CODECS.sizes(self.path / "vae")

    def text_encoder(self) -> TextEncoder:
        """Load the text encoder, for rank0; raises what `codec` does."""
        self._check_part("text_encoder")
        self._check_part("tokenizer")  # where it has one beside it
        return TEXT_ENCODERS.load(self.path / "text_encoder")

    def text_sizes(self) -> TextSizes:
        """What the text encoder will be, from its configuration alone. Raises UserInputError."""
        return TEXT_ENCODERS.sizes(self.path / "text_encoder")

    def _check_part(self, part: str) -> None:
        """Read the files of a part and compare them: who loads them reads them whole, once."""
        known = self.manifest or Manifest.of_sha256s(self.contents.kept_sha256s())
        files = (path.relative_to(self.path).as_posix() for path in model_files(self.path / part))
        try:
            sha256s = {name: read_file(self.path / name).sha256 for name in files}
        except (FileNotFoundError, NotADirectoryError):
            return  # whoever loads it says what is missing
        except OSError as error:
            raise UserInputError(
                f"cannot read {error.filename or self.path / part}: {error.strerror}; copy it again"
            ) from error
        known.check(
            self.path, {name: sha256s[name] for name in sha256s.keys() & known.files.keys()}
        )

    def check_parts(self) -> None:
        """Load codec and text encoder once, so that no rank is the first to find they cannot be.

        Raises:
            UserInputError: one cannot be loaded, or they do not fit the transformer.
        """
        self.geometry(dtype=torch.float32)
        self.codec()
        self.text_encoder()

    def geometry(self, *, dtype: torch.dtype) -> ChunkGeometry:
        """The shape of every tensor of a chunk of this model; no weights are loaded.

        Raises:
            UserInputError: codec or text encoder do not fit the transformer.
        """
        codec, text, config = self.codec_sizes(), self.text_sizes(), self.config
        for name, got, want in (
            ("vae: latent_channels", codec.latent_channels, config.in_channels),
            ("text_encoder: text_dim", text.text_dim, config.text_dim),
        ):
            if got != want:
                fix = "bring the parts of one model together"
                raise UserInputError(mismatch(f"{self.path}: {name}", got=got, want=want, fix=fix))
        return ChunkGeometry(
            latent_channels=config.in_channels,
            frames_per_block=self.recipe.frames_per_block,
            spatial_stride=codec.spatial_stride,
            text_len=text.text_len,
            text_dim=config.text_dim,
            dtype=NAMES[dtype],
            context_frames=self.recipe.context_frames,
        )


def _check_weights(folder: Path, weights: WeightFiles, config: CausalWanConfig) -> None:
    """Compare names and shapes on disk with what `config` needs.

    Raises:
        UserInputError: the weights are another model's.
    """
    with torch.device("meta"):
        needed = {name: tuple(p.shape) for name, p in CausalWanModel(config).named_parameters()}
    check_fit(needed, weights.tensors, where=f"{folder}: the weights do not fit config.json")


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
    slices = {name: w.to(device, dtype) for name, w in shards_of(weights, group).items()}
    return _with_slices(config, slices, group)


def _with_slices(
    config: CausalWanConfig, slices: Mapping[str, Tensor], group: Collectives
) -> CausalWanModel:
    """The model whose parameters are these very tensors."""
    with torch.device("meta"):
        model = CausalWanModel(config, group)
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
