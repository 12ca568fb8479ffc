"""A cache is chosen, described, sized and sharded here without owning a byte of it."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from scope_contracts.errors import CacheError, UserInputError, mismatch
from scope_contracts.gists import GistPlan
from scope_contracts.plain import MAX_LIST_LENGTH
from scope_contracts.row_format import CodecKind, RowFormat
from scope_contracts.tensor_spec import DType

GIST_LEVELS = 5
"""Levels of a hierarchical stream: with chunks of 3 latent frames they reach back 847 of them."""


class CacheKind(StrEnum):
    """Which frames a stream's cache keeps, and how."""

    RING = "ring"
    """Sinks and the newest frames, in place."""
    QUANTIZED = "quantized"
    """The ring, its past in fewer bits."""
    H2O = "h2o"
    """Sinks, recent frames, and those that were attended to most: as many as the ring holds."""
    PAGED = "paged"
    """The ring's frames, in pages of a pool that the stream has to itself."""
    HIERARCHICAL = "hierarchical"
    """Sinks and recent frames in full, older ones as summaries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheChoice:
    """What `--kv-cache` names: `KIND` or `KIND:CODEC`, such as `quantized:int4` or `h2o:int8`."""

    kind: CacheKind = CacheKind.RING
    codec: CodecKind = CodecKind.IDENTITY

    @classmethod
    def named(cls, text: str) -> Self:
        """The choice that `text` names; `quantized` alone is int8, anything else keeps all bits.

        Raises `UserInputError` naming the choices.
        """
        name, _, codec_name = text.partition(":")
        if name not in list(CacheKind):
            raise _unknown(text, f"one of {', '.join(CacheKind)}")
        if ":" in text and codec_name not in list(CodecKind):
            raise _unknown(text, f"a codec of {', '.join(CodecKind)} after the colon")
        kind, is_quantized = CacheKind(name), name == CacheKind.QUANTIZED
        default = CodecKind.INT8 if is_quantized else CodecKind.IDENTITY
        codec = CodecKind(codec_name) if codec_name else default
        if is_quantized and codec is CodecKind.IDENTITY:
            raise _unknown(text, f"{CacheKind.RING}, which keeps all bits")
        if kind is CacheKind.RING and codec is not CodecKind.IDENTITY:
            raise _unknown(text, f"{CacheKind.QUANTIZED}:{codec}, a ring in fewer bits")
        return cls(kind=kind, codec=codec)

    def __str__(self) -> str:
        return f"{self.kind}" if self.codec is CodecKind.IDENTITY else f"{self.kind}:{self.codec}"


def _unknown(text: str, want: str) -> UserInputError:
    return UserInputError(mismatch("kv_cache (SCOPE_KV_CACHE)", got=text, want=want))


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """`[batch, capacity_tokens, heads / tp, head_dim]` keys and values in every layer.

    `sink_frames` and `window_frames` count latent frames of `frame_tokens` tokens each, the chunk
    in flight included (`capacity_tokens` counts gists too); `block_frames` is a chunk's. Raises
    `CacheError` when a size is not positive (`sink_frames` may be 0), `UserInputError` when it does
    not suit the kind or codec.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    frame_tokens: int
    sink_frames: int
    window_frames: int
    batch: int
    dtype: DType
    block_frames: int = 1
    kind: CacheKind = CacheKind.RING
    codec: CodecKind = CodecKind.IDENTITY

    def __post_init__(self) -> None:
        sizes = {
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "head_dim": self.head_dim,
            "frame_tokens": self.frame_tokens,
            "window_frames": self.window_frames,
            "batch": self.batch,
            "block_frames": self.block_frames,
        }
        for name, size in sizes.items():
            if size < 1:
                raise CacheError(mismatch(name, got=size, want="at least 1"))
        if self.sink_frames < 0:
            raise CacheError(mismatch("sink_frames", got=self.sink_frames, want="at least 0"))
        if self.kind is CacheKind.QUANTIZED and self.codec is CodecKind.IDENTITY:
            raise _unknown(f"{self.kind}:{self.codec}", f"{CacheKind.RING}, which keeps all bits")
        _ = self.row_format  # refuses what the codec cannot hold
        if self.kind is CacheKind.H2O and self.hitter_frames < 1:
            want = f"at least {self.block_frames + 2} of a chunk of {self.block_frames}"
            fix = "use --kv-cache ring"
            raise UserInputError(
                mismatch("window_frames of h2o", got=self.window_frames, want=want, fix=fix)
            )
        if self.needs_attention_scores and self.capacity_frames > MAX_LIST_LENGTH:
            want = f"at most {MAX_LIST_LENGTH} with its sinks, which ranks compare frame by frame"
            raise UserInputError(
                mismatch("window_frames of h2o", got=self.window_frames, want=want)
            )
        least = self.gists.group + self.block_frames - 1
        if self.gists.num_levels and self.window_frames < least:
            want, fix = f"at least {least}, to hold a group", "use --kv-cache ring"
            name = "window_frames of hierarchical"
            raise UserInputError(mismatch(name, got=self.window_frames, want=want, fix=fix))

    @property
    def row_format(self) -> RowFormat:
        """One token of one layer, over all heads."""
        return RowFormat.full(
            heads=self.num_heads, head_dim=self.head_dim, dtype=self.dtype, codec=self.codec
        )

    @property
    def capacity_frames(self) -> int:
        """Frames and gists that a chunk sees at most, itself included."""
        return self.sink_frames + self.window_frames + self.gists.num_slots

    @property
    def gists(self) -> GistPlan:
        """What stays of frames that left the window: a gist takes as much room as a frame."""
        levels = GIST_LEVELS if self.kind is CacheKind.HIERARCHICAL else 0
        return GistPlan(group=max(2, self.block_frames), num_levels=levels)

    @property
    def capacity_tokens(self) -> int:
        """Tokens one layer holds per batch row: sinks, window and gists."""
        return self.capacity_frames * self.frame_tokens

    @property
    def recent_frames(self) -> int:
        """Newest frames of the past that heavy hitters never displace: half of the window's past.

        Half and half is what H2O (Zhang et al. 2023, section 5) uses throughout.
        """
        past = max(0, self.window_frames - self.block_frames)
        return past - past // 2

    @property
    def hitter_frames(self) -> int:
        """Frames of the past that stay because they were attended to most."""
        return max(0, self.window_frames - self.block_frames) - self.recent_frames

    @property
    def needs_attention_scores(self) -> bool:
        """Whether the policy must be shown queries and keys once a chunk."""
        return self.kind is CacheKind.H2O

    @property
    def collectives_per_chunk(self) -> int:
        """Reductions over the ranks that share the heads: scores, before anything is evicted."""
        return int(self.needs_attention_scores)

    def indices_at(self, end_frame: int) -> "CacheIndices":
        """Where a cache stands that was filled without a gap up to latent frame `end_frame`."""
        in_full = self.sink_frames + self.window_frames
        gists = self.gists.in_view(max(0, end_frame - in_full))
        held = min(end_frame, in_full) + sum(map(len, gists))
        return CacheIndices(
            global_end_index=end_frame * self.frame_tokens,
            local_end_index=held * self.frame_tokens,
        )

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers and all heads, scales included."""
        return self.num_layers * self.row_format.bytes_per_row

    def num_bytes(self, tp_degree: int) -> int:
        """Bytes one rank allocates when the heads are shared by `tp_degree` ranks.

        Raises `UserInputError` when the heads cannot be shared evenly.
        """
        row_bytes = self.row_format.shard(tp_degree).bytes_per_row
        return self.batch * self.capacity_tokens * self.num_layers * row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheIndices:
    """Where the next chunk goes: `global_end_index` in the endless token timeline,
    `local_end_index` where that falls in the cache. Host integers, never device scalars.
    """

    global_end_index: int
    local_end_index: int
