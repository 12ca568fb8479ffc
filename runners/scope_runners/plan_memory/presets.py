"""A model's sizes come from a name we know, from a folder's own JSON, or from the command line.

No weight is loaded. `krea-14b` and `wan-*` are the published sizes of those video models; `mla-52`
and `mha-52` are one hybrid language model of 52 layers, 13 of which attend, with either cache.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from scope_contracts.errors import UserInputError, shown
from scope_contracts.row_format import Plane, RowFormat
from scope_contracts.tensor_spec import DType
from scope_rt.lm.specs.domains import SequenceCacheSpec
from scope_runners.plan_memory.control import CodecSize, ControlSize, num_weights_in
from scope_runners.plan_memory.layers import caching_layers, refuse_parts, size_in
from scope_runners.plan_memory.model_size import WanSize, t5_encoder_weights
from scope_runners.request import EMBEDDED_MODEL
from scope_runners.wording import nearest

if TYPE_CHECKING:
    from scope_rt.models.loading import ModelFolder

_LATENT_STRIDE = 8
_UMT5_XXL = t5_encoder_weights(
    vocabulary=256_384, dim=4096, ffn_dim=10_240, num_layers=24, heads=64, head_dim=64
)
_WAN_CONTROL = ControlSize(
    text_encoder=_UMT5_XXL,
    autoencoder=126_892_531,
    codec=CodecSize(memory=2364.5, workspace=2550),
)
"""As published; what decoding needs is that of diffusers' `AutoencoderKLWan`."""
_TINY_CODEC = CodecSize(memory=0.25, workspace=108)
_OTHER_ROWS = (
    "global_head_dim",
    "attention_head_dim",
    "attention_head_size",
    "heads_per_layer",
    "kv_channels",
    "kv_shared",
    "multi_query",
    "num_kv_heads",
    "swa_",
)
"""Parts of names that only models have whose rows differ, or come from other entries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoModel:
    """A causal Wan-architecture model. Sizes in pixels and latent frames."""

    size: WanSize
    frames_per_block: int
    window_frames: int
    sink_frames: int = 0
    height: int = 480
    width: int = 832
    text_len: int = 512
    control: ControlSize = _WAN_CONTROL


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel:
    """A model that caches tokens."""

    spec: SequenceCacheSpec
    weights_bytes: int = 0
    """Over all ranks; 0 where it is not known."""
    query_heads: int | None = None
    """None where they are not known."""

    def in_dtype(self, dtype: DType) -> Self:
        """The same sizes, rows in `dtype`."""
        rows = replace(self.spec.row_format, dtype=dtype)
        return replace(self, spec=replace(self.spec, row_format=rows))


def _wan(*, layers: int, heads: int, ffn_dim: int) -> WanSize:
    return WanSize(
        num_layers=layers, num_attention_heads=heads, attention_head_dim=128, ffn_dim=ffn_dim
    )


_WAN_14B = _wan(layers=40, heads=40, ffn_dim=13_824)
_WAN_1_3B = _wan(layers=30, heads=12, ffn_dim=8960)


def _hybrid(row_format: RowFormat) -> LanguageModel:
    spec = SequenceCacheSpec(num_layers=52, attention_layers=13, row_format=row_format)
    return LanguageModel(spec=spec, query_heads=24)


PRESETS: Mapping[str, VideoModel | LanguageModel] = MappingProxyType(
    {
        "krea-14b": VideoModel(size=_WAN_14B, frames_per_block=3, window_frames=6),
        "wan-14b": VideoModel(size=_WAN_14B, frames_per_block=3, window_frames=21),
        "wan-1.3b": VideoModel(size=_WAN_1_3B, frames_per_block=3, window_frames=21),
        "mla-52": _hybrid(RowFormat.latent(rank=512, rope_dim=64, dtype=DType.BFLOAT16)),
        "mha-52": _hybrid(RowFormat.full(heads=24, head_dim=128, dtype=DType.BFLOAT16)),
    }
)


def model_at(name: str, dtype: DType, recipe: str | None = None) -> VideoModel | LanguageModel:
    """A preset, the embedded model, a stream's model folder, or a transformers folder.

    `dtype` is that of a language model's rows, `recipe` a stream's.

    Raises:
        UserInputError: it is none of these, or its JSON lacks a size.
    """
    if name in PRESETS:
        preset = PRESETS[name]
        return preset if isinstance(preset, VideoModel) else preset.in_dtype(dtype)
    if name == EMBEDDED_MODEL or _holds_parts(Path(name)):
        from scope_rt.models.loading import ModelFolder  # loads PyTorch, which presets need not

        return video_model_of(ModelFolder.open(name, recipe))
    if not (Path(name) / "config.json").is_file():
        raise UserInputError(
            f"--model {name!r} is no preset ({', '.join(PRESETS)}), not {EMBEDDED_MODEL!r}, and no "
            f"folder with a config.json{nearest(name, PRESETS)}; give one of these, or --layers, "
            "--heads and --head-dim"
        )
    return _language_folder(Path(name), dtype)


def _holds_parts(folder: Path) -> bool:
    """Whether a folder is a stream's: it has parts, and no `config.json` that says what it is. A
    file that is named in place of a folder is a checkpoint's own."""
    if folder.is_file() or (folder / "transformer").is_dir():
        return True
    of_its_own = (folder / "config.json").is_file()
    return folder.is_dir() and not of_its_own and any(folder.rglob("*.pt*"))


def video_model_of(folder: "ModelFolder") -> VideoModel:
    """The sizes of a stream's model; reads headers only. Raises UserInputError."""
    from scope_rt.vae.tiny import TinyVideoCodec

    config, recipe = folder.config, folder.recipe
    autoencoder = num_weights_in(folder.layout.vae)
    of_wan = _WAN_CONTROL.codec if autoencoder == _WAN_CONTROL.autoencoder else None
    return VideoModel(
        size=WanSize.of(config),
        frames_per_block=recipe.frames_per_block,
        window_frames=recipe.window_frames,
        sink_frames=recipe.sink_frames,
        height=recipe.default_height,
        width=recipe.default_width,
        text_len=folder.text_sizes().text_len,
        control=ControlSize(
            text_encoder=num_weights_in(folder.layout.text_encoder),
            autoencoder=autoencoder,
            codec=_TINY_CODEC if folder.has_codec(TinyVideoCodec.__name__) else of_wan,
        ),
    )


def _language_folder(path: Path, dtype: DType) -> LanguageModel:
    config, instead = (
        path / "config.json",
        "give its sizes, as --layers, --attention-layers, --heads and --head-dim, instead",
    )
    try:
        raw = json.loads(config.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserInputError(f"{config} is not a language model's: {error!r}; {instead}") from error
    if not isinstance(raw, dict):
        got = shown(raw)
        raise UserInputError(f"{config} is not a language model's: it holds {got}; {instead}")
    try:
        layers = caching_layers(raw)
        query_heads = size_in(raw, "num_attention_heads")
        row_format, index_format = _row_formats(raw, query_heads, dtype)
    except UserInputError as error:
        raise UserInputError(
            f"{config} is not a language model's that is known here: {error}; {instead}"
        ) from error
    spec = SequenceCacheSpec(
        num_layers=layers.num_layers,
        attention_layers=len(layers.windows),
        row_format=row_format,
        index_format=index_format,
        windows=layers.windows if any(layers.windows) else (),
    )
    return LanguageModel(spec=spec, weights_bytes=_tensor_bytes(path), query_heads=query_heads)


def _row_formats(
    raw: Mapping[str, Any], heads: int, dtype: DType
) -> tuple[RowFormat, RowFormat | None]:
    """What a `config.json` of transformers says about a cached token, and about an index key."""
    is_latent = bool(raw.get("kv_lora_rank"))
    others = _OTHER_ROWS if is_latent else (*_OTHER_ROWS, "v_head_dim")
    refuse_parts(raw, others, "is of a model whose rows are others, and by what rule")
    if is_latent:
        rank, rope_dim = size_in(raw, "kv_lora_rank"), size_in(raw, "qk_rope_head_dim")
        rows = RowFormat.latent(rank=rank, rope_dim=rope_dim, dtype=dtype)
    else:
        is_written = raw.get("head_dim") is not None
        head_dim = (
            size_in(raw, "head_dim")
            if is_written
            else size_in(raw, "hidden_size", least=heads) // heads
        )
        is_grouped = raw.get("num_key_value_heads") is not None
        kv_heads = size_in(raw, "num_key_value_heads") if is_grouped else heads
        rows = RowFormat.full(heads=kv_heads, head_dim=head_dim, dtype=dtype)
    if not raw.get("index_head_dim"):
        return rows, None
    key = Plane(name="index_key", heads=1, dim=size_in(raw, "index_head_dim"), head_sharded=False)
    return rows, RowFormat(planes=(key,), dtype=dtype)


def _tensor_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def frame_tokens(height: int, width: int) -> int:
    """Tokens of a latent frame of a picture in pixels.

    Raises:
        UserInputError: a side is not a multiple of latent stride times patch.
    """
    multiple = _LATENT_STRIDE * 2
    if height < multiple or width < multiple or height % multiple or width % multiple:
        raise UserInputError(
            f"--height {height} --width {width}: both must be multiples of {multiple}"
        )
    return (height // multiple) * (width // multiple)
