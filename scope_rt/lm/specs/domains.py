"""What a language model's caches take is arithmetic on sizes, and refused before a byte exists."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scope_contracts.errors import CacheError, mismatch
from scope_contracts.row_format import RowFormat
from scope_rt.lm.specs.state_format import StateFormat


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
