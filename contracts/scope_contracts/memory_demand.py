"""A stream or a serving batch says what one rank holds, and which sizes could give way."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from scope_contracts.cache_spec import CacheChoice, CacheKind, KVCacheSpec
from scope_contracts.errors import UserInputError, mismatch
from scope_contracts.memory_plan import (
    RUNTIME_BYTES,
    CacheDomain,
    MemoryLine,
    MemoryPlan,
    smaller,
)
from scope_contracts.model_size import WanSize
from scope_contracts.row_format import CodecKind

_FEWER_BITS = {
    CodecKind.IDENTITY: (CodecKind.INT8, CodecKind.INT4),
    CodecKind.INT8: (CodecKind.INT4,),
    CodecKind.FP8: (CodecKind.INT4,),
    CodecKind.INT4: (),
}
_RUNTIME = MemoryLine(
    name="runtime",
    num_bytes=RUNTIME_BYTES,
    because="CUDA context, kernels, fragmentation",
    is_estimate=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoDemand:
    """One generator rank of a stream. `frame_tokens`, window and codec stand in `spec`.

    Raises `UserInputError` when the heads cannot be shared evenly.
    """

    size: WanSize
    spec: KVCacheSpec
    tp: int
    text_len: int
    other_weights_bytes: int = 0
    """Text encoder and autoencoder, where the rank holds them too."""

    def __post_init__(self) -> None:
        self.size.num_weights(self.tp)

    def plan(self) -> MemoryPlan:
        """Bytes of this rank."""
        size, spec, width = self.size, self.spec, self.spec.dtype.num_bytes
        local, num_weights = size.dim // self.tp, size.num_weights(self.tp)
        lines = [
            MemoryLine(
                name="weights",
                num_bytes=num_weights * width,
                because=f"{num_weights:,} weights of {width} B",
            ),
            MemoryLine(
                name="cache",
                num_bytes=spec.num_bytes(self.tp),
                because=f"{spec.num_layers} layers x {spec.batch} x {spec.capacity_tokens:,} tokens"
                f" x {spec.row_format.shard(self.tp).bytes_per_row:,} B ({_named(spec)})",
            ),
            MemoryLine(
                name="text keys and values",
                num_bytes=size.num_layers * spec.batch * self.text_len * 2 * local * width,
                because=f"{size.num_layers} layers x {self.text_len} tokens x 2 x {local} channels",
            ),
        ]
        if self.other_weights_bytes:
            because = "text encoder and autoencoder"
            lines.append(
                MemoryLine(
                    name="other weights", num_bytes=self.other_weights_bytes, because=because
                )
            )
        return MemoryPlan(lines=(*lines, *self._working(), _RUNTIME))

    def knobs(self) -> Iterable[Iterable[tuple[str, "VideoDemand"]]]:
        """TP degree, bits of the cache, window, batch."""
        return (self._more_ranks(), self._fewer_bits(), self._windows(), self._batches())

    def _working(self) -> Iterator[MemoryLine]:
        """Residual, its norm, q, k, v, attention's output, and the feed-forward of one chunk."""
        spec, local = self.spec, self.size.dim // self.tp
        tokens = spec.batch * spec.block_frames * spec.frame_tokens
        channels = 3 * self.size.dim + 4 * local + 2 * self.size.ffn_dim // self.tp
        yield MemoryLine(
            name="workspace",
            num_bytes=tokens * channels * spec.dtype.num_bytes,
            because=f"one chunk of {tokens:,} tokens x {channels:,} channels",
            is_estimate=True,
        )
        if spec.codec is not CodecKind.IDENTITY or spec.kind is CacheKind.PAGED:
            rows = spec.batch * spec.capacity_tokens
            yield MemoryLine(
                name="view of one layer",
                num_bytes=rows * 2 * local * spec.dtype.num_bytes,
                because=f"{rows:,} tokens, decoded or gathered for attention",
                is_estimate=True,
            )

    def _more_ranks(self) -> Iterator[tuple[str, "VideoDemand"]]:
        for tp in range(self.tp + 1, self.size.num_attention_heads + 1):
            if self.size.num_attention_heads % tp == 0 and self.size.ffn_dim % tp == 0:
                yield f"--tp {tp}", replace(self, tp=tp)

    def _fewer_bits(self) -> Iterator[tuple[str, "VideoDemand"]]:
        kind = CacheKind.QUANTIZED if self.spec.kind is CacheKind.RING else self.spec.kind
        for codec in _FEWER_BITS[self.spec.codec]:
            choice = CacheChoice(kind=kind, codec=codec)
            try:
                spec = replace(self.spec, kind=kind, codec=codec)
            except UserInputError:
                continue  # this kind, or this head_dim, does not take the codec
            yield f"--kv-cache {choice}", replace(self, spec=spec)

    def _windows(self) -> Iterator[tuple[str, "VideoDemand"]]:
        for frames in range(self.spec.window_frames - 1, self.spec.block_frames - 1, -1):
            try:
                spec = replace(self.spec, window_frames=frames)
            except UserInputError:
                return  # too short for heavy hitters
            yield f"--window {frames}", replace(self, spec=spec)

    def _batches(self) -> Iterator[tuple[str, "VideoDemand"]]:
        for batch in range(self.spec.batch - 1, 0, -1):
            yield f"--batch {batch}", replace(self, spec=replace(self.spec, batch=batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingDemand:
    """One rank that serves `num_domains` language models of one shape, each with its own caches.

    Raises `UserInputError` when the heads cannot be shared evenly.
    """

    domain: CacheDomain
    num_domains: int
    tp: int
    weights_bytes: int
    """Of one model, over all ranks; 0 where nobody said."""
    block_size: int = 1
    """Rows are taken in blocks of so many: 1 for a contiguous cache."""

    def __post_init__(self) -> None:
        if self.num_domains < 1 or self.block_size < 1:
            got = (self.num_domains, self.block_size)
            raise UserInputError(mismatch("models and block size", got=got, want="at least 1"))
        self.domain.spec.row_bytes(self.tp)

    @property
    def rows(self) -> int:
        """Rows of one sequence and layer, whole blocks."""
        return -(-self.domain.max_tokens // self.block_size) * self.block_size

    def plan(self) -> MemoryPlan:
        """Bytes of this rank."""
        spec, sequences = self.domain.spec, self.num_domains * self.domain.batch
        where = f"{_count(self.num_domains, 'model')} x {_count(self.domain.batch, 'sequence')}"
        counted = {
            "cache": (self.rows * spec.row_bytes(self.tp), f"{self.rows:,} rows"),
            "index keys": (self.rows * spec.index_bytes(self.tp), f"{self.rows:,} keys"),
            "recurrent states": (spec.state_bytes, "states of any length"),
        }
        lines = [
            MemoryLine(
                name="weights",
                num_bytes=self.num_domains * self.weights_bytes // self.tp,
                because=f"{_count(self.num_domains, 'model')}, shared by {_count(self.tp, 'rank')}"
                if self.weights_bytes
                else "not known: nobody said how large a model is",
                is_estimate=self.tp > 1,
            )
        ]
        lines += [
            MemoryLine(
                name=name,
                num_bytes=sequences * num_bytes,
                because=f"{where} x {what} = {num_bytes:,} B a sequence",
            )
            for name, (num_bytes, what) in counted.items()
            if num_bytes
        ]
        return MemoryPlan(lines=(*lines, *self._working(), _RUNTIME))

    def knobs(self) -> Iterable[Iterable[tuple[str, "ServingDemand"]]]:
        """TP degree, bits of the cache, length, batch."""
        return (self._more_ranks(), self._fewer_bits(), self._lengths(), self._batches())

    def _working(self) -> Iterator[MemoryLine]:
        row_format = self.domain.spec.row_format
        if row_format.codec is CodecKind.IDENTITY and self.block_size == 1:
            return
        plain = replace(row_format, codec=CodecKind.IDENTITY).shard(self.tp).bytes_per_row
        yield MemoryLine(
            name="view of one layer",
            num_bytes=self.domain.batch * self.rows * plain,
            because=f"{self.domain.batch} x {self.rows:,} rows, decoded or gathered for attention",
            is_estimate=True,
        )

    def _more_ranks(self) -> Iterator[tuple[str, "ServingDemand"]]:
        """Degrees up to 64 by powers of two; latents stay whole, weights are shared."""
        for tp in (2, 4, 8, 16, 32, 64):
            try:
                changed = replace(self, tp=tp)
            except UserInputError:
                continue  # the heads do not divide
            if tp > self.tp and changed.plan().num_bytes < self.plan().num_bytes:
                yield f"--tp {tp}", changed

    def _fewer_bits(self) -> Iterator[tuple[str, "ServingDemand"]]:
        for codec in _FEWER_BITS[self.domain.spec.row_format.codec]:
            try:
                row_format = replace(self.domain.spec.row_format, codec=codec)
            except UserInputError:
                continue  # a latent is not quantized
            changed = replace(self.domain.spec, row_format=row_format)
            domain = replace(self.domain, spec=changed)
            yield f"--kv-cache quantized:{codec}", replace(self, domain=domain)

    def _lengths(self) -> Iterator[tuple[str, "ServingDemand"]]:
        for tokens in smaller(self.domain.max_tokens, least=256):
            domain = replace(self.domain, max_tokens=tokens)
            yield f"--length {tokens}", replace(self, domain=domain)

    def _batches(self) -> Iterator[tuple[str, "ServingDemand"]]:
        for batch in range(self.domain.batch - 1, 0, -1):
            yield f"--batch {batch}", replace(self, domain=replace(self.domain, batch=batch))


def _named(spec: KVCacheSpec) -> str:
    return str(CacheChoice(kind=spec.kind, codec=spec.codec))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
