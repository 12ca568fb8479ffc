"""What the arguments of a stream come to: complete and checked before any other rank is met."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from scope_contracts.cache_spec import CacheChoice, CacheKind, KVCacheSpec
from scope_contracts.errors import UserInputError
from scope_contracts.geometry import ChunkGeometry
from scope_contracts.log_records import NOT_RESUMED, Opened
from scope_rt import __version__
from scope_rt.config import RuntimeConfig
from scope_rt.control.context import ContextMemory, anchor_encoder
from scope_rt.control.planner import StreamSettings
from scope_rt.control.recompute import Recompute, choose_recompute
from scope_rt.mesh.rank import RankSetup
from scope_rt.mesh.topology import Topology
from scope_rt.models.loading import EMBEDDED, ModelFolder
from scope_rt.models.past import Past, own_past
from scope_rt.models.recipe import Recipe
from scope_rt.models.shards import check_degree
from scope_rt.tensors import NAMES
from scope_rt.text.encoder import TextEncoder
from scope_rt.vae.codec import VideoCodec


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSetup:
    """One stream as every rank of it sees it, and what rank0 reads and shows it with."""

    rank: RankSetup
    settings: StreamSettings
    recompute: Recompute
    geometry: ChunkGeometry
    cache_spec: KVCacheSpec
    codec: VideoCodec
    text_encoder: TextEncoder

    @classmethod
    def of(
        cls,
        model: str | Path = EMBEDDED,
        *,
        topology: Topology,
        config: RuntimeConfig,
        seed: int = 0,
        height: int | None = None,
        width: int | None = None,
        dtype: torch.dtype = torch.float32,
        kv_cache_attention_bias: float = 1.0,
        kv_cache: str | None = None,
        recompute: str | None = None,
        past: Past = own_past,
    ) -> Self:
        """Read the model folder and settle what was left open; the arguments are a session's.

        Raises:
            UserInputError: an argument cannot be used; the sentence says what to change.
        """
        folder = ModelFolder.open(model)
        recipe = folder.recipe
        check_degree(folder.config, topology.tp_degree)
        chosen = choose_recompute(recipe, recompute, every=config.kv_cache_recompute_every)
        cache = CacheChoice.named(kv_cache or config.kv_cache or CacheKind.RING)
        recipe.check_cache(cache)
        codec, text_encoder = folder.codec(), folder.text_encoder()
        geometry = folder.geometry(dtype=dtype)
        height = recipe.default_height if height is None else height
        width = recipe.default_width if width is None else width
        _check_size(height=height, width=width, multiple=geometry.pixel_multiple)
        _check_numbers(seed=seed, kv_cache_attention_bias=kv_cache_attention_bias)
        rank = RankSetup(
            model=folder,
            topology=topology,
            config=config,
            dtype=dtype,
            height=height,
            width=width,
            recompute_every=chosen.every,
            recompute_anchor=str(chosen.anchor),
            cache=cache,
            past=past,
        )
        settings = StreamSettings(
            plan_id=topology.plan_id,
            recipe=recipe,
            height=height,
            width=width,
            base_seed=seed,
            kv_cache_attention_bias=kv_cache_attention_bias,
            recompute_every=chosen.every,
            bring_up=config.bring_up,
        )
        try:
            cache_spec = rank.cache_spec(geometry)
        except UserInputError as error:
            raise UserInputError(f"--kv-cache {cache}: {error}") from None
        return cls(
            rank=rank,
            settings=settings,
            recompute=chosen,
            geometry=geometry,
            cache_spec=cache_spec,
            codec=codec,
            text_encoder=text_encoder,
        )

    @property
    def recipe(self) -> Recipe:
        """The model's."""
        return self.settings.recipe

    def memory(self) -> ContextMemory:
        """Empty, for the context of this stream."""
        return ContextMemory(
            self.recipe,
            anchor=self.recompute.anchor,
            encode_anchor=anchor_encoder(self.codec),
            first_latent_frames=self.codec.first_latent_frames,
            temporal_stride=self.codec.temporal_stride,
        )

    def identity(self) -> dict[str, str | int | float]:
        """What must be the same for a stream to go on; plan and TP degree may differ."""
        rank, settings = self.rank, self.settings
        return {
            "model": rank.model.fingerprint(),
            "seed": settings.base_seed,
            "height": settings.height,
            "width": settings.width,
            "dtype": str(rank.dtype),
            "kv_cache_attention_bias": settings.kv_cache_attention_bias,
            "recompute_every": settings.recompute_every,
            "recompute_anchor": rank.recompute_anchor,
            "kv_cache": str(rank.cache),
        }

    def opened(self, *, model: str, resumed_at_chunk: int | None) -> Opened:
        """The first record of a recording; `model` as the user named it."""
        rank, settings = self.rank, self.settings
        return Opened(
            at_s=time.time(),
            package_version=__version__,
            torch_version=str(torch.__version__),
            model=model,
            model_fingerprint=rank.model.fingerprint(),
            plan_id=settings.plan_id,
            tp_degree=rank.topology.tp_degree,
            height=settings.height,
            width=settings.width,
            dtype=NAMES[rank.dtype],
            base_seed=settings.base_seed,
            kv_cache_attention_bias=settings.kv_cache_attention_bias,
            backend=rank.backend.name,
            kv_cache_recompute_every=settings.recompute_every,
            recompute_anchor=rank.recompute_anchor,
            kv_cache=str(rank.cache),
            frames_per_block=settings.recipe.frames_per_block,
            fps=settings.recipe.fps,
            resumed_at_chunk=NOT_RESUMED if resumed_at_chunk is None else resumed_at_chunk,
        )


def _check_size(*, height: int, width: int, multiple: int) -> None:
    """Refuse pixels that are no `multiple` of what a latent token shows."""
    for name, pixels in (("height", height), ("width", width)):
        if pixels < multiple or pixels % multiple:
            raise UserInputError(
                f"--{name} {pixels} is not a positive multiple of {multiple}; "
                f"try {max(multiple, pixels // multiple * multiple)}"
            )


def _check_numbers(*, seed: int, kv_cache_attention_bias: float) -> None:
    if not 0 <= seed < 2**63:
        raise UserInputError(f"--seed {seed} is out of range; give a number from 0 to 2^63 - 1")
    if not 0 < kv_cache_attention_bias <= 1:
        raise UserInputError(
            f"--kv-cache-attention-bias {kv_cache_attention_bias} is out of range; "
            f"want 0 < bias <= 1"
        )
