"""What the benchmark tells of states, index keys and domains is true, or would be told as false."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scope_contracts.tensor_spec import DType
from scope_lab.kv_bench import states
from scope_lab.kv_bench.hybrid import HIDDEN, LATENT, MIXER, domain
from scope_lab.kv_bench.states import (
    NUM_DOMAINS,
    Scale,
    measure_domains,
    measure_index_keys,
    measure_states,
)
from scope_rt.lm.cache.domains import CacheDomains
from scope_rt.lm.cache.state import StateCache
from scope_rt.lm.models.mla import MLA, MLAForm
from tests.rounding import FP64_CONTRACT

SCALE = Scale(context=32, num_steps=1, rounds=1)
KEY_BYTES = 32 * 4
"""Channels of an index key, float32."""


def tensors(held: object) -> Iterable[Tensor]:
    """All tensors within a value, each time it is held."""
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, dict):
        yield from tensors(tuple(held.values()))
    elif isinstance(held, list | tuple):
        for part in held:
            yield from tensors(part)


def test_a_state_has_as_many_bytes_after_few_tokens_as_after_many() -> None:
    short, long = measure_states(SCALE)
    assert short.peak_bytes == long.peak_bytes
    assert (short.bytes_per_token or 0) * 8 == (long.bytes_per_token or 0) * 32
    num_bytes = MIXER.state_format(DType.FLOAT32).bytes_per_layer
    assert all(f"{num_bytes:,} bytes in all" in row.notes[0] for row in (short, long))


def test_the_peak_of_a_state_is_what_its_cache_holds_in_an_open_span() -> None:
    state_format = MIXER.state_format(DType.FLOAT32)
    cache = StateCache(state_format, layers=(0,), batch=1, device=torch.device("cpu"))
    cache.extend([1])
    cache.update(0, *cache.state(0))
    held = sum(tensor.nbytes for tensor in tensors(vars(cache)))
    assert measure_states(SCALE)[0].peak_bytes == held


def test_index_keys_come_on_top_of_the_rows_and_all_rows_chosen_are_dense_attention() -> None:
    dense, few, all_rows = measure_index_keys(SCALE)
    row_bytes = LATENT.row_format(DType.FLOAT32).bytes_per_row
    assert dense.bytes_per_token == row_bytes
    assert few.bytes_per_token == all_rows.bytes_per_token == row_bytes + KEY_BYTES
    assert dense.peak_bytes == SCALE.max_tokens * row_bytes, "it is read in place"
    assert few.peak_bytes == SCALE.max_tokens * (row_bytes + KEY_BYTES)
    assert "dense attention's bits" in all_rows.notes[0]
    assert "of its range off dense attention" in few.notes[0]


def test_what_is_timed_as_a_recompute_builds_no_weights_and_expands_the_rows_it_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built, expanded, timed = [], [], []
    init, forward = nn.Linear.__init__, MLA.forward

    def watched_init(self: nn.Linear, *args: Any, **kwargs: Any) -> None:
        built.append(self)
        init(self, *args, **kwargs)

    def watched_forward(self: MLA, x_BTC: Tensor, **kwargs: Any) -> Tensor:
        expanded.append(kwargs.get("form") is MLAForm.EXPANDED)
        out: Tensor = forward(self, x_BTC, **kwargs)
        return out

    def watched_seconds(step: Callable[[], object], count: int) -> float:
        built.clear()
        expanded.clear()
        step()
        timed.append((len(built), tuple(expanded)))
        return 1.0

    monkeypatch.setattr(nn.Linear, "__init__", watched_init)
    monkeypatch.setattr(MLA, "forward", watched_forward)
    monkeypatch.setattr(states, "step_seconds", watched_seconds)
    measure_index_keys(SCALE)
    decoded = (0, (False,))
    assert timed == [decoded, decoded, decoded, (0, (True,))]


def test_a_recompute_of_one_layer_gives_what_it_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = states._rows
    monkeypatch.setattr(
        states,
        "_rows",
        lambda row_format, scale: rows(replace(row_format, dtype=DType.FLOAT64), scale),
    )
    layer = states.AttentionLayer(None, SCALE)
    layer._attend.double()
    x = torch.randn(1, SCALE.max_tokens, HIDDEN, dtype=torch.float64)
    spans = [layer(part) for part in x.split([SCALE.context, 1], dim=1)]
    assert (layer.anew(x) - torch.cat(spans, dim=1)).abs().max() <= FP64_CONTRACT


def test_eight_domains_use_their_planned_bytes_and_none_changes_another() -> None:
    budget, isolation = measure_domains(SCALE).notes
    planned = NUM_DOMAINS * domain("any", SCALE.max_tokens).num_bytes()
    assert budget.startswith(
        f"{planned:,} bytes planned, {planned:,} allocated; one more is refused"
    )
    assert "9 cache domains need" in budget
    assert isolation.startswith("8 of 8 hold what they hold alone; 7 of 7 are as they were")


def test_domains_that_share_memory_are_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = states._opened

    def shared(names: Iterable[str], scale: Scale) -> CacheDomains:
        caches = opened(names, scale)
        first, *others = caches.domains.values()
        for other in others:
            other.rows.store.parts = first.rows.store.parts
        return caches

    monkeypatch.setattr(states, "_opened", shared)
    _, isolation = measure_domains(SCALE).notes
    # Whoever wrote last finds its own rows, until the first writes over them.
    assert isolation.startswith("1 of 8 hold what they hold alone; 0 of 7 are as they were")
