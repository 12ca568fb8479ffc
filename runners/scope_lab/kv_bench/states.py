"""What is cached beside rows: states, index keys, and domains that hold all three.

Where one thing is computed in two ways, a note says how far apart they were in this very run.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from scope_contracts.errors import CacheError
from scope_contracts.row_format import RowFormat
from scope_contracts.tensor_spec import DType
from scope_lab.cache_peak import peak_bytes
from scope_lab.kv_bench.hybrid import (
    HIDDEN,
    LATENT,
    LAYERS,
    MIXER,
    LatentRows,
    SparseAttention,
    Specialist,
    domain,
    indexer_config,
)
from scope_lab.kv_bench.result import Effort, Part, SystemResult
from scope_lab.kv_bench.stopwatch import median_ratio, step_seconds
from scope_rt.lm.cache.contiguous import ContiguousCache
from scope_rt.lm.cache.domains import CacheDomains
from scope_rt.lm.cache.layer_map import AttnLayerMap
from scope_rt.lm.cache.state import StateCache
from scope_rt.lm.models.mamba2 import Mamba2
from scope_rt.lm.models.mla import MLAForm

CPU = torch.device("cpu")
NUM_DOMAINS = 8
DENSE = "latent rows, dense"
Step = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Tokens that are cached before the first timed step, timed steps, rounds of all systems."""

    context: int
    num_steps: int
    rounds: int

    @property
    def contexts(self) -> tuple[int, int]:
        """Two lengths, of which a state takes the same bytes."""
        return self.context // 4, self.context

    @property
    def max_tokens(self) -> int:
        return self.context + self.num_steps

    @property
    def top_k(self) -> int:
        return self.context // 8


SCALES: Mapping[Effort, Scale] = {
    Effort.QUICK: Scale(context=128, num_steps=4, rounds=1),
    Effort.FULL: Scale(context=512, num_steps=16, rounds=5),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of one decode step by system, and of computing everything anew, by round."""

    step_s: Mapping[str, Sequence[float]]
    anew_s: Sequence[float]


@torch.inference_mode()
def measure(effort: Effort) -> Part:
    """Mamba-2's state, a sparse-attention indexer's keys, and eight domains of both."""
    scale = SCALES[effort]
    return Part(
        title="States, index keys and cache domains",
        systems=(*measure_states(scale), *measure_index_keys(scale), measure_domains(scale)),
        notes=(
            "batch 1, float32, random weights, no GPU; one layer each, and for the domains "
            f"{len(LAYERS.others)} Mamba-2 layers and one that attends by index",
            "peak of states: a span's new states lie beside the old ones until it ends",
            "x contiguous: against dense attention to the same latent rows; rows that an index did "
            "not choose are masked here, not skipped, so choosing comes on top",
        ),
    )


def measure_states(scale: Scale) -> tuple[SystemResult, ...]:
    """A step of the recurrence against the scan of everything, at two lengths."""
    torch.manual_seed(0)
    mixer = Mamba2(MIXER).requires_grad_(False)
    return tuple(_state_row(mixer, length, scale) for length in scale.contexts)


def _state_row(mixer: Mamba2, length: int, scale: Scale) -> SystemResult:
    hidden = torch.randn(1, length + 1, HIDDEN)
    prompt, token = hidden.split([length, 1], dim=1)

    def decoder() -> Step:
        cache, _ = _scanned(mixer, prompt)
        return lambda: _mixed(mixer, cache, token)

    times = _timed({"step": decoder}, lambda: _scanned(mixer, hidden), scale)
    (cache, _), (_, whole) = _scanned(mixer, prompt), _scanned(mixer, hidden)
    off_by = float((_mixed(mixer, cache, token) - whole[:, length:]).abs().max())
    return SystemResult(
        name=f"Mamba-2 state, {length} tokens",
        bytes_per_token=cache.num_bytes / length,
        peak_bytes=2 * cache.num_bytes,
        throughput_vs_recompute=median_ratio(times.anew_s, times.step_s["step"]),
        notes=(f"{cache.num_bytes:,} bytes in all; a step is the scan within {off_by:.1e}",),
    )


def _scanned(mixer: Mamba2, x_BTC: Tensor) -> tuple[StateCache, Tensor]:
    """All tokens at once, from a state of nothing."""
    cache = StateCache(MIXER.state_format(DType.FLOAT32), layers=(0,), batch=1, device=CPU)
    return cache, _mixed(mixer, cache, x_BTC)


def _mixed(mixer: Mamba2, cache: StateCache, x_BTC: Tensor) -> Tensor:
    cache.extend([x_BTC.shape[1]])
    out: Tensor = mixer(x_BTC, cache=cache, layer=0)
    cache.advance()
    return out


class AttentionLayer:
    """One layer with caches of its own; without `top_k` there is no index, and all is attended."""

    def __init__(self, top_k: int | None, scale: Scale) -> None:
        torch.manual_seed(0)
        self._attend = SparseAttention(top_k or 1).requires_grad_(False)
        key_format = None if top_k is None else indexer_config(top_k).row_format(DType.FLOAT32)
        self.cached = LatentRows(
            rows=_rows(LATENT.row_format(DType.FLOAT32), scale),
            index_keys=None if key_format is None else _rows(key_format, scale),
        )

    def anew(self, x_BTC: Tensor) -> Tensor:
        """All tokens from nothing, densely, in the form that is the cheaper one for many."""
        rows, num_tokens = self.cached.rows, x_BTC.shape[1]
        rows.reset()
        rows.extend([num_tokens])
        positions, mla = torch.arange(num_tokens)[None], self._attend.attention
        form = MLAForm.EXPANDED
        out: Tensor = mla(x_BTC, positions_BT=positions, cache=rows, layer=0, form=form)
        rows.advance()
        return out

    def __call__(self, x_BTC: Tensor) -> Tensor:
        """The next span."""
        for cache in self.cached.caches():
            cache.extend([x_BTC.shape[1]])
        out: Tensor = self._attend(x_BTC, cached=self.cached, layer=0)
        for cache in self.cached.caches():
            cache.advance()
        return out


def _rows(row_format: RowFormat, scale: Scale) -> ContiguousCache:
    layers, max_tokens = AttnLayerMap.all_of(1), scale.max_tokens
    return ContiguousCache(row_format, layers=layers, batch=1, max_tokens=max_tokens, device=CPU)


def measure_index_keys(scale: Scale) -> tuple[SystemResult, ...]:
    """Attention to the rows that small keys of their own choose, against attention to all."""
    num_rows = scale.context + 1
    hidden = torch.randn(1, num_rows, HIDDEN, generator=torch.Generator().manual_seed(1))
    spans = hidden.split([scale.context, 1], dim=1)
    top_ks = {
        DENSE: None,
        f"index keys, top {scale.top_k}": scale.top_k,
        f"index keys, top {num_rows} of {num_rows}": num_rows,
    }

    def decoder(top_k: int | None) -> Step:
        layer = AttentionLayer(top_k, scale)
        layer(spans[0])
        return partial(layer, spans[1])

    makers = {name: partial(decoder, top_k) for name, top_k in top_ks.items()}
    times = _timed(makers, partial(AttentionLayer(None, scale).anew, hidden), scale)
    layers = {name: AttentionLayer(top_k, scale) for name, top_k in top_ks.items()}
    outputs = {name: torch.cat(list(map(layer, spans)), dim=1) for name, layer in layers.items()}
    return tuple(
        SystemResult(
            name=name,
            bytes_per_token=sum(cache.format.bytes_per_row for cache in layer.cached.caches()),
            peak_bytes=sum(map(peak_bytes, layer.cached.caches())),
            throughput_vs_recompute=median_ratio(times.anew_s, times.step_s[name]),
            throughput_vs_contiguous=median_ratio(times.step_s[DENSE], times.step_s[name]),
            notes=_index_notes(layer.cached, outputs[name], outputs[DENSE]),
        )
        for name, layer in layers.items()
    )


def _index_notes(cached: LatentRows, out: Tensor, dense: Tensor) -> tuple[str, ...]:
    if cached.index_keys is None:
        return ()
    off_by = float((out - dense).abs().max() / dense.abs().max())
    against = (
        f"{off_by:.0%} of its range off dense attention" if off_by else "dense attention's bits"
    )
    return (f"{cached.index_keys.format.bytes_per_row} bytes of a token are its key; {against}",)


def measure_domains(scale: Scale) -> SystemResult:
    """Eight specialists in turn on one budget, against each of them alone."""
    models = {
        f"specialist {seed}": Specialist(seed=seed, top_k=scale.top_k)
        for seed in range(NUM_DOMAINS)
    }
    hidden = torch.randn(1, scale.context, HIDDEN, generator=torch.Generator().manual_seed(2))
    spans = [*hidden.split(scale.context // 2, dim=1), hidden[:, :1]]
    together = _opened(models, scale)
    for span in spans:
        for name, model in models.items():
            model(span, together.domains[name])
    digests = {name: caches.digest() for name, caches in together.domains.items()}
    num_alone = sum(
        _digest_alone(name, model, spans, scale) == digests[name] for name, model in models.items()
    )
    first, *others = models
    together.domains[first].reset()
    models[first](spans[-1], together.domains[first])
    num_untouched = sum(together.domains[name].digest() == digests[name] for name in others)
    states = together.domains[first].states
    assert states is not None, "specialists have states"
    times = _domain_times(models[first], hidden, scale)
    return SystemResult(
        name=f"{NUM_DOMAINS} cache domains",
        bytes_per_token=together.num_bytes / (NUM_DOMAINS * scale.max_tokens),
        peak_bytes=together.num_bytes + states.num_bytes,
        throughput_vs_recompute=median_ratio(times.anew_s, times.step_s["step"]),
        notes=(
            f"{together.budget_bytes:,} bytes planned, {together.num_bytes:,} allocated; one more "
            f"is refused: {_refusal(together, scale)}",
            f"{num_alone} of {NUM_DOMAINS} hold what they hold alone; {num_untouched} of "
            f"{len(others)} are as they were after the first began anew",
        ),
    )


def _domain_times(model: Specialist, hidden: Tensor, scale: Scale) -> Times:
    """Of one specialist: the others change nothing about it."""

    def decoder() -> Step:
        caches = _opened(["it"], scale).domains["it"]
        model(hidden, caches)
        return partial(model, hidden[:, :1], caches)

    return _timed(
        {"step": decoder}, lambda: model(hidden, _opened(["it"], scale).domains["it"]), scale
    )


def _opened(names: Iterable[str], scale: Scale) -> CacheDomains:
    """Domains of these names on a budget that is theirs exactly."""
    domains = [domain(name, scale.max_tokens) for name in names]
    caches = CacheDomains(sum(each.num_bytes() for each in domains))
    for each in domains:
        caches.open(each, layers=LAYERS, device=CPU)
    return caches


def _digest_alone(name: str, model: Specialist, spans: Sequence[Tensor], scale: Scale) -> str:
    caches = _opened([name], scale).domains[name]
    for span in spans:
        model(span, caches)
    return caches.digest()


def _refusal(caches: CacheDomains, scale: Scale) -> str:
    try:
        caches.open(domain("one more", scale.max_tokens), layers=LAYERS, device=CPU)
    except CacheError as error:
        return str(error)
    return "IT WAS NOT"


def _timed(
    makers: Mapping[str, Callable[[], Step]], recompute: Callable[[], object], scale: Scale
) -> Times:
    """Every decoder, newly made, and one recompute in every round."""
    step_s: dict[str, list[float]] = {name: [] for name in makers}
    anew_s = []
    for _ in range(scale.rounds):
        for name, make in makers.items():
            step_s[name].append(step_seconds(make(), scale.num_steps))
        anew_s.append(step_seconds(recompute, 1))
    return Times(step_s=step_s, anew_s=anew_s)
