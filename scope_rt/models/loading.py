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
from scope_contracts.weights import Checksums
from scope_rt.bit_digest import bit_digest
from scope_rt.collectives import Collectives
from scope_rt.models.causal_wan import CausalWanModel, DigestsAsRead
from scope_rt.models.config import CausalWanConfig
from scope_rt.models.content_cache import ContentCache
from scope_rt.models.file_contents import model_files
from scope_rt.models.fingerprint import shard_digest
from scope_rt.models.folder_contents import FolderContents, fingerprint_of, stamps_of
from scope_rt.models.folder_level import folder_around
from scope_rt.models.layout import Layout
from scope_rt.models.lora import Lora
from scope_rt.models.manifest import Difference, Manifest, refusal
from scope_rt.models.recipe import Recipe
from scope_rt.models.registry import CODECS, TEXT_ENCODERS
from scope_rt.models.shards import shard_of, shards_of
from scope_rt.models.weight_files import WeightFiles
from scope_rt.part_place import HERE, PartPlace
from scope_rt.tensor_files.fitting import check_fit
from scope_rt.tensors import NAMES
from scope_rt.text.encoder import TextEncoder, TextSizes
from scope_rt.text.words import PROMPT_WORDS, WordTextEncoder
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
    layout: Layout
    lora: Lora | None
    """Merged into the weights while they are read."""

    @classmethod
    def open(cls, model: str | Path, recipe: str | None = None) -> Self:
        """Open a model folder, a checkpoint's own file with the rest of its model around it, or the
        embedded model by the name "tiny".

        Args:
            recipe: the name of a family or its TOML file; where None, the folder tells it.

        Raises:
            UserInputError: there is no such folder, or a part of it is missing or unknown.
        """
        path = embedded_folder() if model == EMBEDDED else Path(model)
        if not path.exists():
            raise UserInputError(
                f"model folder {str(model)!r} does not exist; give a folder, or {EMBEDDED!r} for "
                f"the embedded model"
            )
        at_open = stamps_of(folder_around(path) if path.is_file() else path)
        layout = Layout.of(path, recipe)
        path = layout.root
        _check_weights(layout)
        manifest, lora = Manifest.read(path), _lora_of(path, layout)
        vouched = {} if manifest is None else dict(manifest.files)
        if lora is not None:  # whose factors are read by slice, and digested by nobody
            vouched.pop(lora.path.relative_to(path).as_posix(), None)
        return cls(
            path=path,
            recipe=layout.family.recipe,
            config=layout.config,
            weights=layout.weights,
            contents=FolderContents(
                path,
                vouched=vouched,
                cache=ContentCache.of(path),
                files=layout.files,
                at_open=at_open,
                loaded=layout.weights_by_file(),
            ),
            manifest=manifest,
            layout=layout,
            lora=lora,
        )

    def fingerprint(self) -> str:
        """SHA-256 over what all files of the folder hold, by which a stream knows its model.

        Reads the files of which nothing is known (see `folder_contents`): none once the folder was
        loaded on this machine.

        Raises:
            UserInputError: a file cannot be read, or was written since the folder was opened.
            FingerprintError: a file is not what the folder's manifest says.
        """
        entries = self.contents.entries()
        self.contents.check_unwritten(entries)
        if missing := self.layout.weights_by_file().keys() - entries.keys():
            raise UserInputError(
                f"cannot read {self.path / min(missing)}: it is gone; copy it again"
            )
        if self.manifest is not None:
            self.manifest.check(self.path, entries)
        return self.layout.with_recipe(fingerprint_of(entries))

    def known_digests(self) -> dict[str, int] | None:
        """What the `stored` digests of all ranks' slices must add up to, by the same names: those
        of the manifest, or of the first time that the folder was read. None where neither is
        known. Reads no weights."""
        files = self.layout.weights_by_file()
        known = self.contents.tensors_known(files)
        if known is None or any(files[name].keys() - known[name].keys() for name in files):
            return None
        return {
            f"{file}/{name}": known[file][tensor]
            for file, names in files.items()
            for tensor, name in names.items()
        }

    def learn(self, whole: Checksums, *, keep: bool) -> None:
        """All ranks together have read these weights, by the names of `stored` digests."""
        self.contents.learn(
            {
                file: {tensor: whole[f"{file}/{name}"] for tensor, name in names.items()}
                for file, names in self.layout.weights_by_file().items()
            },
            keep=keep,
        )

    def check_files(self, whole: Checksums) -> None:
        """Read again what ranks have read otherwise than the manifest says.

        Raises:
            ModelDamageError: naming the file's tensor that is another; without it, a rank erred.
        """
        if self.manifest is None:
            return
        for file, names in self.layout.weights_by_file().items():
            entry = self.manifest.files.get(file)
            for stored, name in names.items():
                want = None if entry is None else entry.tensors.get(stored)
                if want is None:  # the file was added
                    continue
                tensor = self.weights.tensors[name]
                if whole[f"{file}/{name}"] != want and bit_digest(tensor.read()) != want:
                    what = "is not what it was"
                    raise refusal(self.path, Difference(file=file, tensor=stored, what=what))

    def _weight_files(self) -> set[str]:
        """Those that the transformer's weights are made of."""
        paths = {tensor.path for tensor in self.weights.tensors.values()}
        if self.lora is not None:
            paths.add(self.lora.path)
        return {path.relative_to(self.path).as_posix() for path in paths}

    def transformer(
        self, group: Collectives, *, dtype: torch.dtype, device: torch.device
    ) -> CausalWanModel:
        """This rank's slices of the DiT, ready for inference.

        Reads the bytes of those slices and no others, each once; beside them the host holds one
        slice at a time.

        Raises:
            UserInputError: the heads do not divide, or a file cannot be read, or was written since
                the folder was opened.
        """
        self.config.check_degree(group.size)
        slices, stored, used = {}, dict[str, int](), dict[str, int]()
        low_rank = {} if self.lora is None else self.lora.weights
        # What is not kept as it is read goes through one piece of memory: thousands of pieces that
        # come and go between those that stay would leave holes, a third of the shard.
        passing = [
            tensor.num_bytes_of(shard_of(name, group, head_dim=self.config.attention_head_dim))
            for name, tensor in self.weights.tensors.items()
            if (device.type, tensor.dtype) != ("cpu", dtype)
        ]
        buffer = torch.empty(max(passing, default=0), dtype=torch.uint8)
        for path, tensors in self.weights.by_file():
            file = path.relative_to(self.path).as_posix()
            for name, tensor in tensors:
                shard = shard_of(name, group, head_dim=self.config.attention_head_dim)
                stays = (device.type, tensor.dtype) == ("cpu", dtype)
                part = tensor.read(shard, into=None if stays else buffer)
                digest = stored[f"{file}/{name}"] = shard_digest(part, shard)
                if name in low_rank:
                    part = low_rank[name].merged(part.to(device), shard).cpu()
                    digest = shard_digest(part, shard)
                # Not of what is kept: that is compared with it, wherever it lies.
                is_as_used = part.dtype is dtype
                used[name] = digest if is_as_used else shard_digest(part, shard, dtype)
                slices[name] = part.to(device, dtype)
        self.contents.check_unwritten(self._weight_files())
        model = _with_slices(self.config, slices, group)
        model.as_read = DigestsAsRead(stored=stored, used=used)
        return model

    def codec(self, place: PartPlace = HERE) -> VideoCodec:
        """Load the codec, for ranks that decode.

        Raises:
            UserInputError: it cannot be loaded, or a file was written since the folder was opened.
            FingerprintError: its files are not what they were.
        """
        read = self._check_part(self.layout.vae)
        codec = CODECS.load(self.layout.vae, place)
        self.contents.check_unwritten(read)
        return codec

    def has_codec(self, class_name: str) -> bool:
        """Whether the codec is of that class. Raises UserInputError."""
        return CODECS.class_of(self.layout.vae) == class_name

    def codec_sizes(self) -> CodecSizes:
        """What the codec will be, from its configuration alone. Raises UserInputError."""
        return CODECS.sizes(self.layout.vae)

    def text_encoder(self, place: PartPlace = HERE) -> TextEncoder:
        """Load the text encoder, for rank0; raises what `codec` does."""
        read = self._check_part(self.layout.text_encoder)
        read += self._check_part(self.path / "tokenizer")  # where it has one beside it
        text_encoder = TEXT_ENCODERS.load(self.layout.text_encoder, place)
        self.contents.check_unwritten(read)
        return text_encoder

    @property
    def reads_prompts_at_once(self) -> bool:
        """Whether its text encoder is so small that whoever only starts ranks may ask it whether a
        prompt can be read."""
        return TEXT_ENCODERS.is_small(self.layout.text_encoder)

    @property
    def prompt_words(self) -> tuple[str, ...]:
        """All that a prompt may name; empty where the text encoder reads any text."""
        is_of_words = TEXT_ENCODERS.class_of(self.layout.text_encoder) == WordTextEncoder.__name__
        return PROMPT_WORDS if is_of_words else ()

    def text_sizes(self) -> TextSizes:
        """What the text encoder will be, from its configuration alone. Raises UserInputError."""
        return TEXT_ENCODERS.sizes(self.layout.text_encoder)

    def _check_part(self, part: Path) -> list[str]:
        """Read the files of a part and compare them: who loads them reads them whole, once. Returns
        their names."""
        known = self.manifest or Manifest(files=self.contents.kept())
        try:
            paths = [part] if part.is_file() else [*model_files(part)]
            found = self.contents.read_again(
                path.relative_to(self.path).as_posix() for path in paths
            )
        except (FileNotFoundError, NotADirectoryError):
            return []  # whoever loads it says what is missing
        except OSError as error:
            raise UserInputError(
                f"cannot read {error.filename or part}: {error.strerror}; copy it again"
            ) from error
        known.check(self.path, {name: found[name] for name in found.keys() & known.files.keys()})
        return list(found)

    def check_parts(self) -> None:
        """Look at headers of codec and text encoder, so that no rank is the first to find they
        cannot be loaded; reads no weights, but those of parts as small as the embedded model's.

        Raises:
            UserInputError: one cannot be loaded, or they do not fit the transformer.
        """
        self.geometry(dtype=torch.float32)
        CODECS.check(self.layout.vae)
        TEXT_ENCODERS.check(self.layout.text_encoder)

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
            rollout_frames=self.recipe.rollout_frames,
            rollout_overlap=self.recipe.rollout_overlap,
        )


def _check_weights(layout: Layout) -> None:
    """Compare names and shapes on disk with what the transformer's sizes need.

    Raises:
        UserInputError: the weights are another model's.
    """
    with torch.device("meta"):
        model = CausalWanModel(layout.config)
    needed = {name: tuple(p.shape) for name, p in model.named_parameters()}
    where = f"{layout.config_path.parent}: the weights do not fit {layout.config_path.name}"
    check_fit(needed, layout.weights.tensors, where=where)


def _lora_of(folder: Path, layout: Layout) -> Lora | None:
    """Raises UserInputError where it is another model's."""
    part, place = layout.lora, layout.family.lora
    if part is None or place is None:
        return None
    shapes = {name: tuple(each.shape) for name, each in layout.weights.tensors.items()}
    family = layout.family
    said_in = " with ".join(map(str, (f"recipe {family.name}", *family.sources)))
    return Lora.open(folder / part.files[0], part.key, place, shapes, said_in=said_in)


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
    config.check_degree(group.size)
    slices = {
        name: w.to(device, dtype)
        for name, w in shards_of(weights, group, head_dim=config.attention_head_dim).items()
    }
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
