"""What verifying numbers keeps, by level of integrity; a test holds it against a session's own."""

from dataclasses import dataclass

from scope_contracts.cache_spec import KVCacheSpec
from scope_contracts.integrity import IntegrityLevel
from scope_runners.plan_memory.model_size import WanSize
from scope_runners.plan_memory.plan import MemoryLine, shown_size

VERIFICATION = "verification"
_NOISE_LEVELS = 5
"""Four steps and the clean pass, each with weights of its own."""
_CALL_NUMBERS, _LOCAL_CALL_NUMBERS = 48, 20
"""By which blocks' sums are weighted: for each channel of a layer at one noise level, and for each
of this rank's heads. In float32, whatever the model's dtype."""
_LAYER_BYTES = 480
"""A channel of a layer: sums of weights as they were loaded, biases, norms and tables."""
_FIXED_CHUNK_NUMBERS = 32
"""A channel of a layer: keys and values of the fixed chunk's 16 tokens."""
_PENDING_BYTES = 1 << 20
"""Most of rows that were written and wait to be digested, unless one layer's are more."""
_WORKSPACES, _WORKSPACE_BYTES = 2, 64 << 20
_DIGEST_BYTES = 8
_FLOAT32, _FLOAT64 = 4, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Of a generator rank of a stream."""

    size: WanSize
    spec: KVCacheSpec
    tp: int
    text_len: int

    def line(self, level: IntegrityLevel) -> MemoryLine:
        """With what the other level that verifies keeps beside it."""
        strict, default = IntegrityLevel.STRICT, IntegrityLevel.DEFAULT
        other = default if level is strict else strict
        return MemoryLine(
            name=VERIFICATION,
            num_bytes=self.num_bytes(level),
            because=f"--integrity {level}: sums of weights, text keys, digests, watched calls; "
            f"{other} {shown_size(self.num_bytes(other))}",
            is_estimate=True,
        )

    def num_bytes(self, level: IntegrityLevel) -> int:
        """Of what is kept from chunk to chunk, and of what a watched chunk keeps until it ends."""
        if level is IntegrityLevel.OFF:
            return 0
        calls = _NOISE_LEVELS if level is IntegrityLevel.STRICT else 1
        return self.kept_bytes + calls * self._call_bytes + self.working_bytes(calls)

    @property
    def kept_bytes(self) -> int:
        """From chunk to chunk, at both levels."""
        size, spec, layers = self.size, self.spec, self.size.num_layers
        local, width = size.channels(self.tp), spec.dtype.num_bytes
        by_call = _NOISE_LEVELS * (_CALL_NUMBERS * size.dim + _LOCAL_CALL_NUMBERS * local)
        of_text = 2 * spec.batch * self.text_len * local
        fixed = _FIXED_CHUNK_NUMBERS * local * width
        edges = 4 * (size.in_channels + size.out_channels) * size.dim * _FLOAT64
        a_layer = by_call * _FLOAT32 + of_text * _FLOAT32 + _LAYER_BYTES * size.dim + fixed
        planes = len(spec.row_format.planes)
        digests = _DIGEST_BYTES * layers * spec.batch * spec.capacity_frames * planes
        return layers * a_layer + edges + digests + self._pending_bytes

    def working_bytes(self, num_calls: int) -> int:
        """At most, of what so many calls are computed again with: scores, in pieces."""
        heads = self.size.heads_of_rank(self.tp)
        scores = self._tokens * heads * self.spec.capacity_tokens * _FLOAT32
        return _WORKSPACES * min(_WORKSPACE_BYTES, num_calls * self.size.num_layers * scores)

    @property
    def _pending_bytes(self) -> int:
        row_bytes = self.spec.row_format.shard(self.tp).bytes_per_row
        a_layer = self._tokens * row_bytes
        return max(a_layer, min(_PENDING_BYTES, self.size.num_layers * a_layer))

    @property
    def _tokens(self) -> int:
        return self.spec.batch * self.spec.block_frames * self.spec.frame_tokens

    @property
    def _call_bytes(self) -> int:
        """What enters the blocks and what leaves them."""
        return 2 * self._tokens * self.size.dim * self.spec.dtype.num_bytes
