"""Runs in the environment of scripts/kvpress_env; elsewhere it is skipped."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("kvpress", reason="kvpress is not installed; scripts/kvpress_env runs this")

from kvpress import ChunkPress, DecodingPress, KnormPress, StreamingLLMPress
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache

from scope_contracts.errors import UserInputError
from scope_rt.kv_cache.policy import EvictionPolicy, HeavyHitters, RandomRows, sliding_window
from scope_rt.lm.eviction import install_eviction_policy
from scope_rt.lm.kvpress_adapter import (
    PolicyDecodingPress,
    PolicyPress,
    decoding_press,
    eviction_press,
)

POLICY = HeavyHitters(budget=6, num_sink=2, num_recent=4)
VOCAB = 64


def tiny_llama(attention: str = "eager") -> Any:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM._from_config(config, attn_implementation=attention).eval()


def prompt(length: int) -> Tensor:
    return torch.randint(1, VOCAB, (1, length), generator=torch.Generator().manual_seed(length))


@contextmanager
def installed(model: Any, policy: EvictionPolicy, *, per_head: bool) -> Iterator[None]:
    install_eviction_policy(model, policy, per_head=per_head)
    yield


def tokens_and_keys(model: Any, length: int, num_tokens: int) -> tuple[list[int], list[Tensor]]:
    cache = DynamicCache()
    tokens = model.generate(
        prompt(length), max_new_tokens=num_tokens, do_sample=False, past_key_values=cache
    )
    return tokens[0].tolist(), [layer.keys for layer in cache.layers]


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("evict_every", [1, 3])
def test_under_kvpress_the_same_tokens_stay_as_under_install(
    per_head: bool, evict_every: int
) -> None:
    policy = HeavyHitters(budget=6, num_sink=2, num_recent=4, evict_every=evict_every)
    ours, theirs = tiny_llama(), tiny_llama()
    with installed(ours, policy, per_head=per_head):
        want_tokens, want_keys = tokens_and_keys(ours, 30, 12)
    with eviction_press(policy, per_head=per_head)(theirs):
        tokens, keys = tokens_and_keys(theirs, 30, 12)
    assert tokens == want_tokens
    for got, want in zip(keys, want_keys, strict=True):
        torch.testing.assert_close(got, want)


def test_prefill_leaves_the_capacity_or_what_the_ratio_says() -> None:
    model = tiny_llama()
    for ratio, rows in ((0.0, POLICY.capacity), (0.25, 30), (0.75, 10)):
        cache = DynamicCache()
        with PolicyPress(compression_ratio=ratio, policy=POLICY)(model):
            model(prompt(40), past_key_values=cache)
        assert [layer.keys.shape[2] for layer in cache.layers] == [rows, rows]


def test_decoding_keeps_the_cache_within_the_policys_peak() -> None:
    policy = HeavyHitters(budget=6, num_sink=2, num_recent=4, evict_every=3)
    model, cache = tiny_llama(), DynamicCache()
    seen: list[int] = []
    with decoding_press(policy)(model), torch.no_grad():
        for ids in prompt(40).split([29, *[1] * 11], dim=-1):
            model(ids, past_key_values=cache, cache_position=torch.tensor([29 + len(seen) - 1]))
            seen.append(cache.layers[0].keys.shape[2])
    assert seen[0] == 29  # decoding presses leave the prefill alone
    assert max(seen[3:]) == policy.peak


def test_attention_adds_up_over_the_steps_between_two_compressions() -> None:
    """A plain DecodingPress shows a scorer the last step only."""
    policy = HeavyHitters(budget=6, num_sink=2, num_recent=4, evict_every=6)
    keys = []
    for press in (
        decoding_press(policy),
        DecodingPress(
            base_press=PolicyPress(policy=policy), compression_interval=6, target_size=12
        ),
    ):
        model = tiny_llama()
        with press(model):
            keys.append(tokens_and_keys(model, 30, 14)[1][0])
    assert keys[0].shape == keys[1].shape
    assert not torch.equal(keys[0], keys[1])


def test_sink_and_recent_are_kvpress_streaming_llm() -> None:
    """Their own press of that kind is the reference: same rows at the same ratio."""
    model = tiny_llama("sdpa")
    policy = sliding_window(num_recent=100, num_sink=4)  # the ratio says how many are recent
    caches = []
    for press in (
        StreamingLLMPress(compression_ratio=0.5, n_sink=4),
        PolicyPress(compression_ratio=0.5, policy=policy),
    ):
        cache = DynamicCache()
        with press(model):
            model(prompt(40), past_key_values=cache)
        caches.append(cache.layers[1].keys.sort(dim=2).values)
    assert torch.equal(*caches)


def test_presses_of_kvpress_wrap_a_policy() -> None:
    model, cache = tiny_llama("sdpa"), DynamicCache()
    policy = RandomRows(sizes=POLICY)
    press = ChunkPress(press=PolicyPress(compression_ratio=0.5, policy=policy), chunk_length=10)
    with press(model):
        model(prompt(40), past_key_values=cache)
    assert cache.get_seq_length() == 20


def test_a_press_is_good_for_another_sequence_and_leaves_no_hook_behind() -> None:
    model, press = tiny_llama(), eviction_press(POLICY)
    with press(model):
        tokens_and_keys(model, 30, 4)
        again = tokens_and_keys(model, 25, 8)
    assert not any(layer.self_attn._forward_hooks for layer in model.model.layers)
    fresh = tiny_llama()
    with eviction_press(POLICY)(fresh):
        want = tokens_and_keys(fresh, 25, 8)
    assert again[0] == want[0]
    assert all(torch.equal(*pair) for pair in zip(again[1], want[1], strict=True))


def test_ranking_by_attention_without_probabilities_is_refused() -> None:
    model = tiny_llama("sdpa")
    with (
        pytest.raises(UserInputError, match='attn_implementation="eager"'),
        PolicyPress(policy=POLICY)(model),
    ):
        model(prompt(40), past_key_values=DynamicCache())


def test_accumulating_decoding_takes_a_policy_press_only() -> None:
    with pytest.raises(UserInputError, match=r"KnormPress.*use DecodingPress"):
        PolicyDecodingPress(base_press=KnormPress())
