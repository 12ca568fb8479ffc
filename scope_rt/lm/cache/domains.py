"""Models side by side share one budget of bytes and nothing else.

A domain is one model's rows, index keys and states. It is planned first and allocated as planned;
one that would exceed the budget is refused before a byte of it exists. The budget is of what stays:
while a domain has a span open, its new states lie beside it, in `span_bytes` more.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from scope_contracts.errors import CacheError, mismatch
from scope_contracts.row_format import RowFormat
from scope_rt.lm.cache.contiguous import ContiguousCache
from scope_rt.lm.cache.layer_map import AttnLayerMap
from scope_rt.lm.cache.state import StateCache
from scope_rt.lm.specs.domains import CacheDomain, plan_domains


@dataclass(frozen=True, slots=True, kw_only=True)
class DomainCaches:
    """All that one model caches on this rank."""

    domain: CacheDomain
    rows: ContiguousCache
    index_keys: ContiguousCache | None
    states: StateCache | None

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return sum(cache.num_bytes for cache in self._caches())

    def reset(self) -> None:
        """Forget everything of this domain; the memory stays its own."""
        for cache in self._caches():
            cache.reset()

    def digest(self) -> str:
        """Of every cache of this domain, in one string."""
        return "-".join(cache.digest() for cache in self._caches())

    def _caches(self) -> tuple[ContiguousCache | StateCache, ...]:
        return tuple(c for c in (self.rows, self.index_keys, self.states) if c is not None)


class CacheDomains:
    """Domains by name, within `budget_bytes` of this rank."""

    def __init__(self, budget_bytes: int, *, tp_degree: int = 1) -> None:
        self.budget_bytes, self.tp_degree = budget_bytes, tp_degree
        self._open: dict[str, DomainCaches] = {}

    @property
    def domains(self) -> Mapping[str, DomainCaches]:
        """What is open, by name."""
        return MappingProxyType(self._open)

    @property
    def num_bytes(self) -> int:
        """Bytes allocated, over all domains."""
        return sum(caches.num_bytes for caches in self._open.values())

    @property
    def span_bytes(self) -> int:
        """Most bytes beside those while one domain has a span open."""
        open_domains = (caches.domain for caches in self._open.values())
        return max((each.span_bytes(self.tp_degree) for each in open_domains), default=0)

    def open(
        self, domain: CacheDomain, *, layers: AttnLayerMap, device: torch.device
    ) -> DomainCaches:
        """Allocate a domain's caches.

        Raises:
            CacheError: the name is taken, the layer map is another model's, or the budget is too
                small; nothing was allocated.
        """
        spec = domain.spec
        have, want = (layers.num_slots, layers.num_layers), (spec.attention_layers, spec.num_layers)
        if have != want:
            raise CacheError(mismatch(f"layer map of {domain.name}", got=have, want=want))
        others = [caches.domain for caches in self._open.values()]
        plan_domains([*others, domain], self.budget_bytes, tp_degree=self.tp_degree)
        caches = DomainCaches(
            domain=domain,
            rows=self._rows(spec.row_format, domain, layers, device),
            index_keys=None
            if spec.index_format is None
            else self._rows(spec.index_format, domain, layers, device),
            states=None
            if spec.state_format is None or not layers.others
            else StateCache(
                spec.state_format.shard(self.tp_degree),
                layers=layers.others,
                batch=domain.batch,
                device=device,
            ),
        )
        assert caches.num_bytes == domain.num_bytes(self.tp_degree), "planned as allocated"
        self._open[domain.name] = caches
        return caches

    def close(self, name: str) -> None:
        """Give a domain's bytes back to the budget.

        Raises:
            CacheError: no such domain is open.
        """
        if name not in self._open:
            have = ", ".join(self._open) or "none"
            raise CacheError(f"no cache domain is called {name!r}; open are: {have}")
        del self._open[name]

    def _rows(
        self, rows: RowFormat, domain: CacheDomain, layers: AttnLayerMap, device: torch.device
    ) -> ContiguousCache:
        return ContiguousCache(
            rows.shard(self.tp_degree),
            layers=layers,
            batch=domain.batch,
            max_tokens=domain.max_tokens,
            device=device,
        )
