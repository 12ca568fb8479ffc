"""What a rank needs is arithmetic on sizes: it is known, and refused, before a byte is allocated.

Caches are counted exactly, from the same formats that allocate them. What cannot be counted is a
line that says it is an estimate. A GB is 10^9 bytes, a GiB 2^30.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from scope_contracts.errors import CacheError, mismatch
from scope_contracts.row_format import CodecKind, RowFormat
from scope_contracts.state_format import StateFormat

RUNTIME_BYTES = 1 << 30
"""CUDA context, kernels and what the allocator cannot use: an estimate."""
FEWER_BITS: Mapping[CodecKind, Sequence[CodecKind]] = MappingProxyType(
    {
        CodecKind.IDENTITY: (CodecKind.INT8, CodecKind.INT4),
        CodecKind.INT8: (CodecKind.INT4,),
        CodecKind.FP8: (CodecKind.INT4,),
        CodecKind.INT4: (),
    }
)
"""Codecs that take less than each, the next smaller one first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLine:
    """One thing that takes memory on one rank."""

    name: str
    num_bytes: int
    because: str
    """How the number comes about, for a reader."""
    is_estimate: bool = False
    is_known: bool = True
    """Whether anybody said what it takes; if not, it is counted as nothing."""


RUNTIME = MemoryLine(
    name="runtime",
    num_bytes=RUNTIME_BYTES,
    because="CUDA context, kernels, fragmentation",
    is_estimate=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """All of one rank."""

    lines: tuple[MemoryLine, ...]

    @property
    def num_bytes(self) -> int:
        return sum(line.num_bytes for line in self.lines)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of the lines that nothing is known about."""
        return tuple(line.name for line in self.lines if not line.is_known)

    def bytes_of(self, name: str) -> int:
        """Bytes of the lines called `name`; 0 where there is none."""
        return sum(line.num_bytes for line in self.lines if line.name == name)

    def fits(self, available_bytes: int) -> bool:
        return self.num_bytes <= available_bytes


class Demand(Protocol):
    """Something that could be run: what it needs, and what could be changed about it."""

    def plan(self) -> MemoryPlan:
        """Bytes of one rank."""
        ...

    def knobs(self) -> Iterable["Knob"]:
        """All that can be changed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One thing that can be changed, ever further: each setting needs less than the one before."""

    flag: str
    settings: Sequence[Any]
    """As they are typed behind `flag`."""
    turned: Callable[[Any], Demand]

    def fitting(self, available_bytes: int) -> str | None:
        """The smallest change that fits, as typed."""
        first = bisect_left(
            self.settings,
            True,
            key=lambda setting: self.turned(setting).plan().fits(available_bytes),
        )
        return f"{self.flag} {self.settings[first]}" if first < len(self.settings) else None


def fitting_changes(demand: Demand, available_bytes: int) -> tuple[str, ...]:
    """The smallest change of each knob that makes `demand` fit: any one of them is enough.

    Where no change alone is, the first knob is turned as far as it goes, and each answer begins
    with that. Empty where `demand` fits already, or nothing helps.
    """
    if demand.plan().fits(available_bytes):
        return ()
    knobs = [knob for knob in demand.knobs() if knob.settings]
    found = [knob.fitting(available_bytes) for knob in knobs]
    if any(found) or not knobs:
        return tuple(text for text in found if text)
    knob, furthest = knobs[0], knobs[0].settings[-1]
    more = fitting_changes(knob.turned(furthest), available_bytes)
    return tuple(f"{knob.flag} {furthest} {text}" for text in more)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceCacheSpec:
    """The caches of one language model: rows of layers that attend, states of those that do not.

    Raises `CacheError` when there are more attention layers than layers, or none, and for windows
    that are not theirs.
    """

    num_layers: int
    attention_layers: int
    row_format: RowFormat
    """Of one token in one attention layer, over all ranks."""
    index_format: RowFormat | None = None
    """Of one key of a sparse-attention indexer, in every attention layer."""
    state_format: StateFormat | None = None
    """Of one sequence in one of the other layers, over all ranks."""
    windows: tuple[int | None, ...] = ()
    """Tokens each attention layer sees, its own included; None sees all. Empty: all see all.

    Paged rows leave with the window; a contiguous cache has room for all of them.
    """

    def __post_init__(self) -> None:
        if not 1 <= self.attention_layers <= self.num_layers:
            want = f"1 to {self.num_layers}, the number of layers"
            raise CacheError(mismatch("attention layers", got=self.attention_layers, want=want))
        if self.windows and len(self.windows) != self.attention_layers:
            want = f"one for each of {self.attention_layers} attention layers"
            raise CacheError(mismatch("windows", got=len(self.windows), want=want))
        if any(window is not None and window < 1 for window in self.windows):
            raise CacheError(mismatch("windows", got=self.windows, want="at least 1 token each"))

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """`windows`, one for each attention layer."""
        return self.windows or (None,) * self.attention_layers

    def bytes_per_token(self, tp_degree: int = 1) -> int:
        """Bytes one rank holds of a token, over all layers; latents are whole on every rank."""
        return self.row_bytes(tp_degree) + self.index_bytes(tp_degree)

    def row_bytes(self, tp_degree: int) -> int:
        """Bytes of a token's rows, over all layers."""
        return self.attention_layers * self.row_format.shard(tp_degree).bytes_per_row

    def index_bytes(self, tp_degree: int) -> int:
        """Bytes of a token's index keys, over all layers."""
        if self.index_format is None:
            return 0
        return self.attention_layers * self.index_format.shard(tp_degree).bytes_per_row

    def state_bytes(self, tp_degree: int) -> int:
        """Bytes of a sequence's states, over all layers, at any length."""
        if self.state_format is None:
            return 0
        return self.other_layers * self.state_format.shard(tp_degree).bytes_per_layer

    @property
    def other_layers(self) -> int:
        """Layers that do not attend."""
        return self.num_layers - self.attention_layers

    def bytes_per_sequence(self, max_tokens: int, tp_degree: int = 1) -> int:
        """Bytes one rank holds of a sequence of `max_tokens`."""
        return max_tokens * self.bytes_per_token(tp_degree) + self.state_bytes(tp_degree)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheDomain:
    """One model's contiguous caches for its own batch: isolated from every other domain.

    Raises `CacheError` for a size below 1.
    """

    name: str
    spec: SequenceCacheSpec
    batch: int
    max_tokens: int

    def __post_init__(self) -> None:
        for name, size in (("batch", self.batch), ("max_tokens", self.max_tokens)):
            if size < 1:
                raise CacheError(mismatch(f"{self.name} {name}", got=size, want="at least 1"))

    def num_bytes(self, tp_degree: int = 1) -> int:
        """Bytes one rank holds for this domain between two steps."""
        return self.batch * self.spec.bytes_per_sequence(self.max_tokens, tp_degree)

    def span_bytes(self, tp_degree: int = 1) -> int:
        """Bytes beside those while a span is open: its states replace the old ones at its end."""
        return self.batch * self.spec.state_bytes(tp_degree)


def plan_domains(
    domains: Sequence[CacheDomain], budget_bytes: int, *, tp_degree: int = 1
) -> Mapping[str, int]:
    """Bytes of every domain by name between two steps, all of them within one budget.

    Raises:
        CacheError: a name is used twice, or the budget is exceeded; it names the shortfall.
    """
    planned: dict[str, int] = {}
    for domain in domains:
        if domain.name in planned:
            raise CacheError(f"two cache domains are called {domain.name!r}; each needs its own")
        planned[domain.name] = domain.num_bytes(tp_degree)
    missing = sum(planned.values()) - budget_bytes
    if missing > 0:
        raise CacheError(
            f"{len(planned)} cache domains need {sum(planned.values())} bytes, {missing} more than "
            f"the budget of {budget_bytes}; shorten max_tokens, lower a batch, or raise the budget"
        )
    return planned
