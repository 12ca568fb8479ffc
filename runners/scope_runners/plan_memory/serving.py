"""A serving batch says what one rank holds, and which of its sizes could give way."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from scope_contracts.errors import UserInputError, mismatch
from scope_contracts.row_format import CodecKind, RowFormat
from scope_contracts.tensor_spec import DType
from scope_rt.lm.specs.domains import CacheDomain
from scope_rt.lm.specs.row_storage import Contiguous, Evicting, Paged, RowCount, RowStorage
from scope_runners.plan_memory.plan import (
    FEWER_BITS,
    RUNTIME,
    MemoryLine,
    MemoryPlan,
    Option,
    RankMemory,
)
from scope_runners.wording import counted

_LEAST_TOKENS = 256
"""The advice never goes below: shorter sequences, or fewer rows of them, serve nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRequirement:
    """One rank that serves `num_domains` language models of one shape.

    Their contiguous caches are their own; their blocks come from one pool. Raises `UserInputError`
    when the heads cannot be shared evenly.
    """

    domain: CacheDomain
    num_domains: int
    tp: int
    weights_bytes: int
    """Of one model, over all ranks; 0 where unknown."""
    storage: RowStorage = field(default_factory=Contiguous)
    query_heads: int | None = None
    """Of one model, over all ranks; None where unknown."""

    def __post_init__(self) -> None:
        if self.num_domains < 1:
            raise UserInputError(mismatch("models", got=self.num_domains, want="at least 1"))
        self.domain.spec.bytes_per_sequence(1, self.tp)  # refuses what ranks cannot share

    @property
    def count(self) -> RowCount:
        """Rows of one sequence, and those that all share."""
        return self.storage.count(self.domain.spec.layer_windows, self.domain.max_tokens)

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes one rank holds of one sequence."""
        spec = self.domain.spec
        beside = self.storage.marks(spec.row_format.dtype)
        a_row = self._rows().bytes_per_row + self._index_bytes() + beside
        return self.count.per_sequence * a_row + spec.state_bytes(self.tp)

    def rank_memory(self) -> tuple[RankMemory, ...]:
        """All ranks hold the same."""
        return (RankMemory(role="serving", ranks=tuple(range(self.tp)), plan=self.plan()),)

    def plan(self) -> MemoryPlan:
        """Bytes of one rank."""
        counted = (self._weights(), *self._counted(), *self._states())
        attending = (*self._working(), *self._mask(), *self._probabilities())
        return MemoryPlan(lines=(*counted, *attending, RUNTIME))

    def options(self) -> Iterable[Option]:
        """TP degree, bits of the cache, blocks, rows that stay, tokens at once, length, batch."""
        return (
            self._more_ranks(),
            self._fewer_bits(),
            self._blocks(),
            self._fewer_rows(),
            self._shorter_feeds(),
            self._lengths(),
            self._batches(),
        )

    def _rows(self) -> RowFormat:
        return self.domain.spec.row_format.shard(self.tp)

    def _index_bytes(self) -> int:
        """Of one index key."""
        keys = self.domain.spec.index_format
        return 0 if keys is None else keys.shard(self.tp).bytes_per_row

    def _where(self) -> str:
        return f"{counted(self.num_domains, 'model')} x {counted(self.domain.batch, 'sequence')}"

    def _weights(self) -> MemoryLine:
        return MemoryLine(
            name="weights",
            num_bytes=self.num_domains * self.weights_bytes // self.tp,
            because=f"{counted(self.num_domains, 'model')}, shared by {counted(self.tp, 'rank')}"
            if self.weights_bytes
            else "not known: give --weights-gib, or a folder with weights",
            is_estimate=self.tp > 1,
            is_known=self.weights_bytes > 0,
        )

    def _counted(self) -> Iterator[MemoryLine]:
        count, dtype = self.count, self.domain.spec.row_format.dtype
        num_rows = self.num_domains * self.domain.batch * count.per_sequence + count.shared
        a_row = {
            "cache": self._rows().bytes_per_row,
            "index keys": self._index_bytes(),
            "columns and scores": self.storage.marks(dtype),
        }
        zero_block = ", and one zero block" if count.shared else ""
        for name, num_bytes in a_row.items():
            if num_bytes:
                yield MemoryLine(
                    name=name,
                    num_bytes=num_rows * num_bytes,
                    because=f"{self._where()} x {count.because} x {num_bytes:,} B{zero_block}",
                )

    def _states(self) -> Iterator[MemoryLine]:
        spec, name = self.domain.spec, "recurrent states"
        if not spec.other_layers:
            return
        if spec.state_format is None:
            because = f"not known: {spec.other_layers} layers do not attend; give --mamba2"
            yield MemoryLine(
                name=name, num_bytes=0, because=because, is_estimate=True, is_known=False
            )
            return
        num_bytes = spec.state_bytes(self.tp)
        yield MemoryLine(
            name=name,
            num_bytes=self.num_domains * self.domain.batch * num_bytes,
            because=f"{self._where()} x {spec.other_layers} layers = {num_bytes:,} B a sequence, "
            "at any length",
        )
        yield MemoryLine(
            name="new states of a span",
            num_bytes=self.domain.span_bytes(self.tp),
            because=f"{counted(self.domain.batch, 'sequence')} of one model at a time, beside the "
            "old ones until the span ends",
        )

    def _working(self) -> Iterator[MemoryLine]:
        spec = self.domain.spec
        num_bytes, what = self.storage.working(
            self._rows(), spec.layer_windows, self.domain.max_tokens
        )
        if num_bytes:
            yield MemoryLine(
                name="view of one layer",
                num_bytes=self.domain.batch * num_bytes,
                because=f"{counted(self.domain.batch, 'sequence')} x {what}",
                is_estimate=True,
            )

    def _mask(self) -> Iterator[MemoryLine]:
        """Eviction works under eager attention, which is given a mask over all tokens ever seen.

        It is made of flags, then of numbers; a layer takes from it the rows that it holds.
        """
        if not isinstance(self.storage, Evicting):
            return
        tokens, width = self.domain.max_tokens, self.domain.spec.row_format.dtype.num_bytes
        fed, rows = self.storage.fed_at_once(tokens), self.storage.rows_at_once(tokens)
        a_token = tokens * (DType.BOOL.num_bytes + width) + rows * width
        yield MemoryLine(
            name="attention mask",
            num_bytes=self.domain.batch * fed * a_token,
            because=f"{counted(self.domain.batch, 'sequence')} x {fed:,} tokens at once x "
            f"{a_token:,} B for {tokens:,} tokens seen",
            is_estimate=True,
        )

    def _probabilities(self) -> Iterator[MemoryLine]:
        """Eviction watches what every token attends to, which no fused kernel shows.

        Eager attention holds scores, their softmax in float32, and that in the rows' dtype.
        """
        if not isinstance(self.storage, Evicting):
            return
        name, tokens = "attention weights", self.domain.max_tokens
        if self.query_heads is None:
            because = "not known without the number of heads; give a model folder"
            yield MemoryLine(
                name=name, num_bytes=0, because=because, is_estimate=True, is_known=False
            )
            return
        width, single = self.domain.spec.row_format.dtype.num_bytes, DType.FLOAT32.num_bytes
        each = width + max(width, single) + (width if width < single else 0)
        heads = -(-self.query_heads // self.tp)
        fed, seen = self.storage.fed_at_once(tokens), self.storage.rows_at_once(tokens)
        yield MemoryLine(
            name=name,
            num_bytes=self.domain.batch * heads * fed * seen * each,
            because=f"{counted(self.domain.batch, 'sequence')} x {counted(heads, 'head')} x "
            f"{fed:,} tokens at once x {seen:,} rows x {each} B",
            is_estimate=True,
        )

    def _more_ranks(self) -> Option:
        """Degrees up to 64 by powers of two; latents stay whole, weights are shared."""
        changed = {}
        for tp in (2, 4, 8, 16, 32, 64):
            try:
                requirement = replace(self, tp=tp)
            except UserInputError:
                continue  # the heads do not divide
            if tp > self.tp and requirement.plan().num_bytes < self.plan().num_bytes:
                changed[tp] = requirement
        return Option(flag="--tp", values=list(changed), changed_to=changed.__getitem__)

    def _fewer_bits(self) -> Option:
        changed = {}
        for codec in FEWER_BITS[self.domain.spec.row_format.codec]:
            try:
                row_format = replace(self.domain.spec.row_format, codec=codec)
            except UserInputError:
                continue  # a latent is not quantized
            spec = replace(self.domain.spec, row_format=row_format)
            requirement = replace(self, domain=replace(self.domain, spec=spec))
            changed[f"{self.storage.encoded}:{codec}"] = requirement
        return Option(flag="--kv-cache", values=list(changed), changed_to=changed.__getitem__)

    def _blocks(self) -> Option:
        """Only blocks leave with a window; what is contiguous has room for all tokens."""
        spec, codec = self.domain.spec, self.domain.spec.row_format.codec
        is_worth_it = isinstance(self.storage, Contiguous) and any(spec.windows)
        name = Paged.lossless if codec is CodecKind.IDENTITY else f"{Paged.encoded}:{codec}"
        return Option(
            flag="--kv-cache",
            values=[name] if is_worth_it else [],
            changed_to=lambda _: replace(self, storage=Paged()),
        )

    def _fewer_rows(self) -> Option:
        storage = self.storage
        if not isinstance(storage, Evicting):
            return Option(flag="--keep", values=(), changed_to=lambda _: self)
        return Option(
            flag="--keep",
            values=range(min(storage.keep, self.domain.max_tokens) - 1, _LEAST_TOKENS - 1, -1),
            changed_to=lambda rows: replace(self, storage=replace(storage, keep=rows)),
        )

    def _shorter_feeds(self) -> Option:
        storage = self.storage
        if not isinstance(storage, Evicting):
            return Option(flag="--prefill-chunk", values=(), changed_to=lambda _: self)
        return Option(
            flag="--prefill-chunk",
            values=range(storage.fed_at_once(self.domain.max_tokens) - 1, 0, -1),
            changed_to=lambda tokens: replace(self, storage=replace(storage, prefill_chunk=tokens)),
        )

    def _lengths(self) -> Option:
        return Option(
            flag="--length",
            values=range(self.domain.max_tokens - 1, _LEAST_TOKENS - 1, -1),
            changed_to=lambda tokens: replace(self, domain=replace(self.domain, max_tokens=tokens)),
        )

    def _batches(self) -> Option:
        return Option(
            flag="--batch",
            values=range(self.domain.batch - 1, 0, -1),
            changed_to=lambda batch: replace(self, domain=replace(self.domain, batch=batch)),
        )
