"""What a person typed becomes a requirement, or one sentence that says why it cannot."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from scope_contracts.cache_spec import CacheChoice, KVCacheSpec
from scope_contracts.envelope import PlanId
from scope_contracts.errors import UserInputError, mismatch
from scope_contracts.integrity import IntegrityLevel
from scope_contracts.row_format import CodecKind, RowFormat
from scope_contracts.tensor_spec import DType
from scope_rt.lm.specs.domains import CacheDomain, SequenceCacheSpec
from scope_rt.lm.specs.row_storage import (
    BLOCK_SIZE,
    PREFILL_CHUNK,
    Contiguous,
    Evicting,
    Paged,
    RowStorage,
)
from scope_rt.setup_choices import stream_dtype
from scope_rt.topology import Topology
from scope_runners.parts import register_parts
from scope_runners.plan_memory.arguments import DEFAULT_MODEL
from scope_runners.plan_memory.gpus import gpu_named
from scope_runners.plan_memory.model_size import WanSize
from scope_runners.plan_memory.presets import LanguageModel, VideoModel, frame_tokens, model_at
from scope_runners.plan_memory.serving import ServingRequirement
from scope_runners.plan_memory.video import VideoRequirement

DEFAULT_LENGTH = 8192
_VIDEO_ONLY = ("height", "width", "window", "sink", "block", "plan", "integrity", "control_device")
_STORAGE = {"block_size": ("paged",), "prefill_chunk": ("paged", "h2o"), "keep": ("h2o",)}
"""Kinds of `--kv-cache` that each size belongs to."""
_LANGUAGE_ONLY = ("length", "models", *_STORAGE, "mamba2", "weights_bytes")
_VIDEO_SIZES = ("layers", "heads", "head_dim", "ffn_dim")
_LATENT_SIZES = ("layers", "latent_rank", "rope_dim")
_FULL_SIZES = ("layers", "heads", "head_dim")
_MORE_SIZES = ("attention_layers", "kv_heads")
_ALL_SIZES = tuple(dict.fromkeys((*_VIDEO_SIZES, *_LATENT_SIZES, *_MORE_SIZES)))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRequest:
    """What was asked for, and the memory of one GPU."""

    model: str
    requirement: VideoRequirement | ServingRequirement
    available_bytes: int | None

    @classmethod
    def from_arguments(cls, namespace: argparse.Namespace) -> Self:
        """The request that the arguments make.

        Raises:
            UserInputError: they contradict each other, or name nothing we know.
        """
        register_parts(namespace.parts)
        model = _model(namespace)
        requirement = (
            _video(model, namespace)
            if isinstance(model, VideoModel)
            else _serving(model, namespace)
        )
        return cls(
            model=namespace.model or ("sizes as given" if namespace.layers else DEFAULT_MODEL),
            requirement=requirement,
            available_bytes=_available(namespace),
        )


def _model(namespace: argparse.Namespace) -> VideoModel | LanguageModel:
    sizes = _given(namespace, _ALL_SIZES)
    if sizes and namespace.model:
        raise UserInputError(f"got --model and {_flags(sizes)}; give a model or its sizes")
    if not sizes:
        name = namespace.model or DEFAULT_MODEL
        model = model_at(name, _language_dtype(namespace), namespace.recipe)
    else:
        model = _from_sizes(namespace, sizes)
    foreign = _LANGUAGE_ONLY if isinstance(model, VideoModel) else _VIDEO_ONLY
    if given := _given(namespace, foreign):
        family = "language" if isinstance(model, VideoModel) else "video"
        raise UserInputError(f"for {family} models only: {_flags(given)}; leave it out")
    return model


def _from_sizes(namespace: argparse.Namespace, given: Sequence[str]) -> VideoModel | LanguageModel:
    is_latent = "latent_rank" in given or "rope_dim" in given
    is_video = "ffn_dim" in given and not is_latent
    needed = _LATENT_SIZES if is_latent else _VIDEO_SIZES if is_video else _FULL_SIZES
    more = () if is_video else _MORE_SIZES[:1] if is_latent else _MORE_SIZES
    if missing := [name for name in needed if name not in given]:
        raise UserInputError(f"sizes lack {_flags(missing)}; give them, or --model")
    if foreign := [name for name in given if name not in (*needed, *more)]:
        raise UserInputError(
            f"sizes of one model are {_flags([*needed, *more])}; leave out {_flags(foreign)}"
        )
    if is_video:
        size = WanSize(
            num_layers=namespace.layers,
            num_attention_heads=namespace.heads,
            attention_head_dim=namespace.head_dim,
            ffn_dim=namespace.ffn_dim,
        )
        return VideoModel(size=size, frames_per_block=3, window_frames=21)
    rows = (
        RowFormat.latent(
            rank=namespace.latent_rank,
            rope_dim=namespace.rope_dim,
            dtype=_language_dtype(namespace),
        )
        if is_latent
        else RowFormat.full(
            heads=namespace.kv_heads or namespace.heads,
            head_dim=namespace.head_dim,
            dtype=_language_dtype(namespace),
        )
    )
    attend = namespace.attention_layers or namespace.layers
    if attend > namespace.layers:
        want = f"at most --layers {namespace.layers}"
        raise UserInputError(mismatch("--attention-layers", got=attend, want=want))
    spec = SequenceCacheSpec(num_layers=namespace.layers, attention_layers=attend, row_format=rows)
    return LanguageModel(spec=spec, query_heads=namespace.heads)


def _video(model: VideoModel, namespace: argparse.Namespace) -> VideoRequirement:
    plan_id = namespace.plan or PlanId.SINGLE
    Topology(plan_id=plan_id, tp_degree=namespace.tp)  # refuses a degree that the plan cannot have
    sizes = {
        "height": namespace.height,
        "width": namespace.width,
        "frames_per_block": namespace.block,
        "window_frames": namespace.window,
        "sink_frames": namespace.sink,
    }
    model = replace(model, **{name: size for name, size in sizes.items() if size is not None})
    window, sink, block = model.window_frames, model.sink_frames, model.frames_per_block
    if window < block or sink < 0:
        want = f"a window of at least the chunk's {block}, and no negative sink"
        raise UserInputError(mismatch("--window and --sink", got=(window, sink), want=want))
    return requirement_of(
        model,
        plan_id=plan_id,
        tp=namespace.tp,
        dtype=namespace.dtype or stream_dtype(on_gpu=_is_on_gpu(namespace)),
        cache=CacheChoice.named(namespace.kv_cache or "ring"),
        batch=namespace.batch,
        integrity=namespace.integrity or IntegrityLevel.DEFAULT,
        control_device=namespace.control_device,
    )


def requirement_of(
    model: VideoModel,
    *,
    plan_id: PlanId,
    tp: int,
    dtype: DType,
    cache: CacheChoice | None = None,
    batch: int = 1,
    integrity: IntegrityLevel = IntegrityLevel.DEFAULT,
    control_device: str | None = None,
) -> VideoRequirement:
    """What a stream of `model` needs; by default with a ring.

    Raises:
        UserInputError: the heads cannot be shared so, the cache cannot be so, or there is no such
            device.
    """
    cache = cache or CacheChoice()
    spec = KVCacheSpec(
        num_layers=model.size.num_layers,
        num_heads=model.size.num_attention_heads,
        head_dim=model.size.attention_head_dim,
        frame_tokens=frame_tokens(model.height, model.width),
        sink_frames=model.sink_frames,
        window_frames=model.window_frames,
        batch=batch,
        dtype=dtype,
        block_frames=model.frames_per_block,
        kind=cache.kind,
        codec=cache.codec,
    )
    return VideoRequirement(
        size=model.size,
        spec=spec,
        tp=tp,
        text_len=model.text_len,
        plan_id=plan_id,
        control=model.control,
        integrity=integrity,
        control_device=control_device,
    )


def _serving(model: LanguageModel, namespace: argparse.Namespace) -> ServingRequirement:
    spec = replace(model.spec, row_format=_stored(model.spec.row_format, namespace.kv_cache))
    if namespace.mamba2 is not None:
        if not spec.other_layers:
            raise UserInputError(
                f"--mamba2: all {spec.num_layers} layers attend, so none keeps a state; leave it "
                "out, or give sizes with --attention-layers"
            )
        spec = replace(
            spec, state_format=replace(namespace.mamba2, dtype=_language_dtype(namespace))
        )
    domain = CacheDomain(
        name="model",
        spec=spec,
        batch=namespace.batch,
        max_tokens=namespace.length or DEFAULT_LENGTH,
    )
    return ServingRequirement(
        domain=domain,
        num_domains=namespace.models or 1,
        tp=namespace.tp,
        weights_bytes=namespace.weights_bytes or model.weights_bytes,
        storage=_storage(spec, namespace),
        query_heads=model.query_heads,
    )


def _storage(spec: SequenceCacheSpec, namespace: argparse.Namespace) -> RowStorage:
    """How `--kv-cache` lays rows down."""
    name = (namespace.kv_cache or Contiguous.lossless).partition(":")[0]
    for size in _given(namespace, tuple(_STORAGE)):
        if name not in _STORAGE[size]:
            kinds = " or ".join(_STORAGE[size])
            raise UserInputError(
                f"{_flags([size])} belongs to --kv-cache {kinds}; leave one of them out"
            )
    if name == Paged.lossless:
        return Paged(
            block_size=namespace.block_size or BLOCK_SIZE,
            prefill_chunk=namespace.prefill_chunk or PREFILL_CHUNK,
        )
    if name != Evicting.lossless:
        return Contiguous()
    if any(spec.windows):
        raise UserInputError(
            "--kv-cache h2o: layers of this model have a sliding window, which drops tokens on its "
            "own; use --kv-cache paged"
        )
    if spec.index_format is not None:
        raise UserInputError(
            "--kv-cache h2o: this model's indexer chooses among all rows, so none may leave; use "
            "--kv-cache paged"
        )
    if namespace.keep is None:
        raise UserInputError(
            "--kv-cache h2o needs --keep, the rows a layer keeps of a sequence: sinks + budget + "
            "recent + evict_every - 1"
        )
    return Evicting(keep=namespace.keep, prefill_chunk=namespace.prefill_chunk)


def _stored(rows: RowFormat, kind: str | None) -> RowFormat:
    """The rows as `--kv-cache KIND[:CODEC]` stores them."""
    name, _, codec = (kind or "contiguous").partition(":")
    is_latent = not any(plane.head_sharded for plane in rows.planes)
    if name == "latent" and not is_latent:
        raise UserInputError(
            "--kv-cache latent: this model caches full keys and values; give --latent-rank and "
            "--rope-dim, or a model with MLA"
        )
    if name not in ("contiguous", "paged", "latent", "quantized", "h2o"):
        want = "contiguous, paged[:CODEC], quantized[:CODEC], h2o[:CODEC] or latent for a "
        want += "language model"
        raise UserInputError(mismatch("--kv-cache", got=kind, want=want))
    codec = codec or (CodecKind.INT8 if name == "quantized" else CodecKind.IDENTITY)
    if name == "quantized" and codec == CodecKind.IDENTITY:
        want = "contiguous, which keeps all bits"
        raise UserInputError(mismatch("--kv-cache", got=kind, want=want))
    if name in ("contiguous", "latent") and codec != CodecKind.IDENTITY:
        want = f"quantized:{codec} or paged:{codec}"
        raise UserInputError(mismatch("--kv-cache", got=kind, want=want))
    if codec not in list(CodecKind):
        want = f"a codec of {', '.join(CodecKind)} after the colon"
        raise UserInputError(mismatch("--kv-cache", got=kind, want=want))
    return replace(rows, codec=CodecKind(codec))


def _is_on_gpu(namespace: argparse.Namespace) -> bool:
    return namespace.gpu is not None or namespace.gpu_bytes is not None


def _language_dtype(namespace: argparse.Namespace) -> DType:
    return namespace.dtype or DType.BFLOAT16


def _available(namespace: argparse.Namespace) -> int | None:
    if namespace.gpu and namespace.gpu_bytes:
        raise UserInputError("got --gpu and --gpu-gib; give one of them")
    if namespace.gpu:
        return gpu_named(namespace.gpu).num_bytes
    size: int | None = namespace.gpu_bytes
    return size


def _given(namespace: argparse.Namespace, names: Sequence[str]) -> list[str]:
    return [name for name in names if vars(namespace)[name] is not None]


def _flags(names: Sequence[str]) -> str:
    typed = [name.replace("weights_bytes", "weights_gib") for name in names]
    return ", ".join("--" + name.replace("_", "-") for name in typed)
