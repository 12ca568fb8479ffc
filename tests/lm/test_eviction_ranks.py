"""Tensor-parallel ranks see their own heads only: scores are summed before anybody chooses."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from scope_rt.collectives import Collectives
from scope_rt.lm.eviction import install_kv_eviction
from tests.lm.eviction_models import prompt, tiny_lm
from tests.thread_ranks import ThreadCollectives, on_all_ranks, thread_ranks

SIZES: dict[str, Any] = {"budget": 3, "n_sink": 1, "n_recent": 2}
RANKS = 2


def share_of(whole: Any, kind: str, collectives: ThreadCollectives) -> Any:
    """Rank's half of the heads; `o_proj` sums the halves, everything else is replicated."""
    heads: dict[str, Any] = {
        "num_attention_heads": 2,
        "num_key_value_heads": 2 if kind == "deepseek_v3" else 1,
    }
    model = tiny_lm(kind, **heads)
    state = whole.state_dict()
    for name, weight in model.state_dict().items():
        full = state[name]
        for dim in range(full.ndim):
            if weight.shape[dim] != full.shape[dim]:
                full = full.chunk(RANKS, dim)[collectives.rank]
        weight.copy_(full)

    def sum_over_ranks(module: Any, args: Any, output: Tensor) -> Tensor:
        return collectives.all_reduce_sum(output)

    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(sum_over_ranks)
    return model


@torch.no_grad()
def columns_kept(model: Any, tokens: Tensor) -> list[Any]:
    """Of each layer, after every one of `tokens` (a prefill of 12, then one by one)."""
    cache = DynamicCache()
    kept = []
    for ids in (tokens[:, :12], *tokens[:, 12:].split(1, dim=-1)):
        model(ids, past_key_values=cache)
        kept.append([layer.positions.tolist() for layer in cache.layers])
    return kept


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_ranks_that_sum_their_scores_evict_what_one_rank_would(kind: str) -> None:
    tokens = prompt(24)
    whole = tiny_lm(kind)
    groups = thread_ranks(RANKS)
    shares = [share_of(whole, kind, collectives) for collectives in groups]

    def kept(rank: int, reduced: Collectives | None) -> list[Any]:
        install_kv_eviction(shares[rank], **SIZES, collectives=reduced)
        return columns_kept(shares[rank], tokens)

    install_kv_eviction(whole, **SIZES)
    want = columns_kept(whole, tokens)
    got = on_all_ranks(RANKS, lambda rank: kept(rank, groups[rank]))
    assert got == [want, want]
    layers, steps, sums_each = 2, 13, 2  # o_proj's, and one an eviction
    assert groups[0].num_sums == layers * steps * sums_each


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_ranks_that_do_not_sum_drift_apart(kind: str) -> None:
    """The counterpart: what the sum is for."""
    tokens = prompt(24)
    whole = tiny_lm(kind)
    groups = thread_ranks(RANKS)

    def kept(rank: int) -> list[Any]:
        model = share_of(whole, kind, groups[rank])
        install_kv_eviction(model, **SIZES)
        return columns_kept(model, tokens)

    first, second = on_all_ranks(RANKS, kept)
    assert first != second


def test_heads_that_choose_alone_need_no_sum() -> None:
    (collectives, _) = thread_ranks(RANKS)
    model = tiny_lm("llama")
    install_kv_eviction(model, **SIZES, per_head=True, collectives=collectives)
    columns_kept(model, prompt(24))
    assert collectives.num_sums == 0
