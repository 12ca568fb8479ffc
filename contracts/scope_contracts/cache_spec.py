"""A cache is described, sized and sharded here without owning a byte of it."""

from dataclasses import dataclass

from scope_contracts.errors import CacheError, UserInputError, mismatch
from scope_contracts.tensor_spec import DType

_KEYS_AND_VALUES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """A ring of `[batch, sink + window, heads / tp, head_dim]` keys and values in every layer.

    `sink_frames` and `window_frames` count latent frames of `frame_tokens` tokens each.
    Raises `CacheError` when a size is not positive (`sink_frames` may be 0).
    """

    num_layers: int
    num_heads: int
    head_dim: int
    frame_tokens: int
    sink_frames: int
    window_frames: int
    batch: int
    dtype: DType

    def __post_init__(self) -> None:
        sizes = {
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "head_dim": self.head_dim,
            "frame_tokens": self.frame_tokens,
            "window_frames": self.window_frames,
            "batch": self.batch,
        }
        for name, size in sizes.items():
            if size < 1:
                raise CacheError(mismatch(name, got=size, want="at least 1"))
        if self.sink_frames < 0:
            raise CacheError(mismatch("sink_frames", got=self.sink_frames, want="at least 0"))

    @property
    def capacity_tokens(self) -> int:
        """Tokens one layer's ring holds per batch row: sinks and window."""
        return (self.sink_frames + self.window_frames) * self.frame_tokens

    def indices_at(self, end_frame: int) -> "CacheIndices":
        """Where a ring stands that was filled without a gap up to latent frame `end_frame`."""
        held = min(end_frame, self.sink_frames + self.window_frames)
        return CacheIndices(
            global_end_index=end_frame * self.frame_tokens,
            local_end_index=held * self.frame_tokens,
        )

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all layers and all heads."""
        return (
            _KEYS_AND_VALUES
            * self.num_layers
            * self.num_heads
            * self.head_dim
            * self.dtype.num_bytes
        )

    def num_bytes(self, tp_degree: int) -> int:
        """Bytes one rank allocates when the heads are shared by `tp_degree` ranks.

        Raises `UserInputError` when the heads cannot be shared evenly.
        """
        if tp_degree < 1 or self.num_heads % tp_degree:
            want = f"a divisor of the model's {self.num_heads} heads"
            raise UserInputError(mismatch("tp", got=tp_degree, want=want, fix="change --tp"))
        return self.batch * self.capacity_tokens * self.bytes_per_token // tp_degree


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheIndices:
    """Where the next chunk goes: `global_end_index` in the endless token timeline,
    `local_end_index` where that falls in the ring. Host integers, never device scalars.
    """

    global_end_index: int
    local_end_index: int
