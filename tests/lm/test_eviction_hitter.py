"""A token that everybody looks at survives, and a sliding window forgets it."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache

from scope_rt.kv_cache.policy import EvictionPolicy, HeavyHitters, RandomRows, sliding_window
from scope_rt.lm.eviction import install_eviction_policy

HITTER, PAYLOAD, FILLERS = 1, 2, range(3, 16)
DIM = 16


def model_that_looks_at_the_hitter() -> Any:
    """One attention layer, weights set by hand.

    Embedding: channel 0 is 1 for every token, channel 1 marks the hitter, channel 2 is its payload.
    Queries read channel 0, keys channel 1, into the slowest rotating pair, whose angle over these
    lengths is next to nothing. Values carry the payload, the head says it.
    """
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=DIM,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e9},
        eos_token_id=None,
        bos_token_id=None,
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
    attention, slow = model.model.layers[0].self_attn, DIM - 1
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.zero_()
        embedding = model.model.embed_tokens.weight
        embedding[:, 0] = 1
        embedding[HITTER, 1] = embedding[HITTER, 2] = 1
        attention.q_proj.weight[slow, 0] = 4
        attention.k_proj.weight[slow, 1] = 4
        attention.v_proj.weight[2, 2] = 1
        attention.o_proj.weight[2, 2] = 1
        model.lm_head.weight[PAYLOAD, 2] = 1
    return model


@torch.no_grad()
def says_payload(policy: EvictionPolicy | None) -> bool:
    """Whether the model still says the payload 24 fillers after the prompt held the hitter."""
    model = model_that_looks_at_the_hitter()
    if policy is not None:
        install_eviction_policy(model, policy)
    fillers = torch.tensor([[FILLERS[n % len(FILLERS)] for n in range(30)]])
    ids = torch.cat([fillers[:, :4], torch.tensor([[HITTER]]), fillers[:, 4:6]], dim=-1)
    cache = DynamicCache()
    logits = model(ids, past_key_values=cache).logits
    for filler in fillers[0, 6:]:
        logits = model(filler[None, None], past_key_values=cache).logits
    best = logits[0, -1].max()
    return bool(logits[0, -1].argmax() == PAYLOAD and best > 0.1)


def test_the_full_cache_says_it() -> None:
    assert says_payload(None)


def test_heavy_hitters_keep_it_where_a_window_of_equal_size_loses_it() -> None:
    assert says_payload(HeavyHitters(budget=2, num_sink=2, num_recent=4))
    assert not says_payload(sliding_window(num_sink=2, num_recent=6))
    assert not says_payload(sliding_window(num_recent=8))


def test_a_budget_of_one_is_enough_for_one() -> None:
    assert says_payload(HeavyHitters(budget=1, num_sink=0, num_recent=3))


@pytest.mark.parametrize("seed", [0, 1])
def test_chance_does_not_keep_it(seed: int) -> None:
    sizes = HeavyHitters(budget=2, num_sink=2, num_recent=4)
    assert not says_payload(RandomRows(sizes=sizes, seed=seed))
