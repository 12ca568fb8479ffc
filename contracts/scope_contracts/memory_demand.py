"""A stream or a serving batch says what one rank holds, and which sizes could give way."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from scope_contracts.cache_spec import CacheChoice, CacheKind, KVCacheSpec
from scope_contracts.envelope import PlanId
from scope_contracts.errors import UserInputError, mismatch
from scope_contracts.memory_plan import (
    RUNTIME_BYTES,
    CacheDomain,
    Knob,
    MemoryLine,
    MemoryPlan,
)
from scope_contracts.model_size import WanSize
from scope_contracts.row_format import CodecKind

_FEWER_BITS = {
    CodecKind.IDENTITY: (CodecKind.INT8, CodecKind.INT4),
    CodecKind.INT8: (CodecKind.INT4,),
    CodecKind.FP8: (CodecKind.INT4,),
    CodecKind.INT4: (),
}
_LEAST_TOKENS = 256
"""Nobody is told to serve shorter sequences."""
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
    plan_id: PlanId
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

    def knobs(self) -> Iterable[Knob]:
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

    def _more_ranks(self) -> Knob:
        heads, ffn_dim = self.size.num_attention_heads, self.size.ffn_dim
        degrees = [n for n in range(self.tp + 1, heads + 1) if heads % n == 0 and ffn_dim % n == 0]
        return Knob(
            flag=f"--plan {PlanId.TP_V1_1} --tp" if self.plan_id is PlanId.SINGLE else "--tp",
            settings=degrees,
            turned=lambda tp: replace(
                self,
                tp=tp,
                plan_id=PlanId.TP_V1_1 if self.plan_id is PlanId.SINGLE else self.plan_id,
            ),
        )

    def _fewer_bits(self) -> Knob:
        kind = CacheKind.QUANTIZED if self.spec.kind is CacheKind.RING else self.spec.kind
        changed = {}
        for codec in _FEWER_BITS[self.spec.codec]:
            try:
                spec = replace(self.spec, kind=kind, codec=codec)
            except UserInputError:
                continue  # this kind, or this head_dim, does not take the codec
            changed[str(CacheChoice(kind=kind, codec=codec))] = replace(self, spec=spec)
        return Knob(flag="--kv-cache", settings=list(changed), turned=changed.__getitem__)

    def _windows(self) -> Knob:
        changed = {}
        for frames in range(self.spec.window_frames - 1, self.spec.block_frames - 1, -1):
            try:
                spec = replace(self.spec, window_frames=frames)
            except UserInputError:
                break  # too short for heavy hitters
            changed[frames] = replace(self, spec=spec)
        return Knob(flag="--window", settings=list(changed), turned=changed.__getitem__)

    def _batches(self) -> Knob:
        return Knob(
            flag="--batch",
            settings=range(self.spec.batch - 1, 0, -1),
            turned=lambda batch: replace(self, spec=replace(self.spec, batch=batch)),
        )


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
    block_size: int | None = None
    """Rows are taken in blocks of so many, from a pool with a zero block; None: contiguous."""

    def __post_init__(self) -> None:
        if self.num_domains < 1 or (self.block_size is not None and self.block_size < 1):
            got = (self.num_domains, self.block_size)
            raise UserInputError(mismatch("models and block size", got=got, want="at least 1"))
        self.domain.spec.bytes_per_sequence(self.rows, self.tp)  # refuses what ranks cannot share

    @property
    def rows(self) -> int:
        """Rows of one sequence and layer, whole blocks."""
        size = self.block_size or 1
        return -(-self.domain.max_tokens // size) * size

    def plan(self) -> MemoryPlan:
        """Bytes of this rank."""
        spec, sequences = self.domain.spec, self.num_domains * self.domain.batch
        where = f"{_count(self.num_domains, 'model')} x {_count(self.domain.batch, 'sequence')}"
        counted = {
            "cache": (self.rows * spec.row_bytes(self.tp), f"{self.rows:,} rows"),
            "index keys": (self.rows * spec.index_bytes(self.tp), f"{self.rows:,} keys"),
            "recurrent states": (spec.state_bytes(self.tp), "states of any length"),
        }
        zero_block = self.num_domains * (self.block_size or 0)
        counted_once = {
            "cache": zero_block * spec.row_bytes(self.tp),
            "index keys": zero_block * spec.index_bytes(self.tp),
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
                num_bytes=sequences * num_bytes + counted_once.get(name, 0),
                because=f"{where} x {what} = {num_bytes:,} B a sequence"
                + (", and a zero block a model" if counted_once.get(name) else ""),
            )
            for name, (num_bytes, what) in counted.items()
            if num_bytes
        ]
        if spec.other_layers and spec.state_format is None:
            because = f"not known: {spec.other_layers} layers do not attend; give --mamba2"
            lines.append(
                MemoryLine(name="recurrent states", num_bytes=0, because=because, is_estimate=True)
            )
        return MemoryPlan(lines=(*lines, *self._working(), _RUNTIME))

    def knobs(self) -> Iterable[Knob]:
        """TP degree, bits of the cache, length, batch."""
        return (self._more_ranks(), self._fewer_bits(), self._lengths(), self._batches())

    def _working(self) -> Iterator[MemoryLine]:
        row_format = self.domain.spec.row_format
        if row_format.codec is CodecKind.IDENTITY and self.block_size is None:
            return
        plain = replace(row_format, codec=CodecKind.IDENTITY).shard(self.tp).bytes_per_row
        yield MemoryLine(
            name="view of one layer",
            num_bytes=self.domain.batch * self.rows * plain,
            because=f"{self.domain.batch} x {self.rows:,} rows, decoded or gathered for attention",
            is_estimate=True,
        )

    def _more_ranks(self) -> Knob:
        """Degrees up to 64 by powers of two; latents stay whole, weights are shared."""
        changed = {}
        for tp in (2, 4, 8, 16, 32, 64):
            try:
                demand = replace(self, tp=tp)
            except UserInputError:
                continue  # the heads do not divide
            if tp > self.tp and demand.plan().num_bytes < self.plan().num_bytes:
                changed[tp] = demand
        return Knob(flag="--tp", settings=list(changed), turned=changed.__getitem__)

    def _fewer_bits(self) -> Knob:
        kind = "quantized" if self.block_size is None else "paged"
        changed = {}
        for codec in _FEWER_BITS[self.domain.spec.row_format.codec]:
            try:
                row_format = replace(self.domain.spec.row_format, codec=codec)
            except UserInputError:
                continue  # a latent is not quantized
            spec = replace(self.domain.spec, row_format=row_format)
            changed[f"{kind}:{codec}"] = replace(self, domain=replace(self.domain, spec=spec))
        return Knob(flag="--kv-cache", settings=list(changed), turned=changed.__getitem__)

    def _lengths(self) -> Knob:
        return Knob(
            flag="--length",
            settings=range(self.domain.max_tokens - 1, _LEAST_TOKENS - 1, -1),
            turned=lambda tokens: replace(self, domain=replace(self.domain, max_tokens=tokens)),
        )

    def _batches(self) -> Knob:
        return Knob(
            flag="--batch",
            settings=range(self.domain.batch - 1, 0, -1),
            turned=lambda batch: replace(self, domain=replace(self.domain, batch=batch)),
        )


def _named(spec: KVCacheSpec) -> str:
    return str(CacheChoice(kind=spec.kind, codec=spec.codec))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
