"""What cannot work is refused by name, with the remedy, before anything is touched."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, StaticCache

from scope_contracts.errors import CacheError, UnsupportedError, UserInputError
from scope_contracts.row_format import CodecKind
from scope_rt.lm.eviction import install_kv_eviction, remove_kv_eviction
from tests.lm.eviction_models import prompt, tiny_lm

SIZES: dict[str, Any] = {"budget": 3, "n_sink": 2, "n_recent": 3}


def has_hooks(model: nn.Module) -> bool:
    return any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("attention", ["sdpa", "flex_attention"])
def test_attention_without_probabilities_is_refused_at_install(attention: str) -> None:
    model = tiny_lm("llama", attention=attention)
    with pytest.raises(UserInputError, match=f'{attention}.*attn_implementation="eager"'):
        install_kv_eviction(model, **SIZES)
    assert not has_hooks(model)


def test_attention_that_was_changed_later_is_refused_before_the_cache_is_touched() -> None:
    model, cache = tiny_lm("llama"), DynamicCache()
    install_kv_eviction(model, **SIZES)
    model.set_attn_implementation("sdpa")
    with pytest.raises(UserInputError, match='attn_implementation="eager"'):
        model(prompt(12), past_key_values=cache)
    assert cache.layers == []


@pytest.mark.parametrize(
    ("sizes", "remedy"),
    [
        ({"budget": -1}, "budget: got -1.*raise it to 0"),
        ({"n_sink": -1}, "num_sink"),
        ({"n_recent": -1}, "num_recent"),
        ({"evict_every": 0}, "evict_every: got 0.*raise it to 1"),
        ({"budget": 0, "n_sink": 0, "n_recent": 0}, "raise num_recent"),
    ],
)
def test_sizes_that_cannot_work_are_refused_at_install(sizes: dict[str, int], remedy: str) -> None:
    model = tiny_lm("llama")
    with pytest.raises(UserInputError, match=remedy):
        install_kv_eviction(model, **(SIZES | sizes))
    assert not has_hooks(model)


def test_heads_of_a_latent_cannot_keep_tokens_of_their_own() -> None:
    model = tiny_lm("deepseek_v3")
    with pytest.raises(UserInputError, match="leave per_head off"):
        install_kv_eviction(model, **SIZES, per_head=True)
    assert not has_hooks(model)


@pytest.mark.parametrize(
    ("kind", "codec", "remedy"),
    [
        ("deepseek_v3", CodecKind.INT8, "keep latent caches at codec identity"),
        ("llama", CodecKind.INT4, "dim: got 8, want a multiple of 16; use int8"),
    ],
)
def test_a_codec_that_cannot_store_the_rows_is_refused(
    kind: str, codec: CodecKind, remedy: str
) -> None:
    model = tiny_lm(kind)
    with pytest.raises(UserInputError, match=remedy):
        install_kv_eviction(model, **SIZES, codec=codec)
    assert not has_hooks(model)


def test_a_codec_in_words_is_that_codec_or_refused() -> None:
    model = tiny_lm("llama")
    with pytest.raises(UserInputError, match="codec: got 'int3', want one of identity, int8"):
        install_kv_eviction(model, **SIZES, codec="int3")
    with pytest.raises(UserInputError, match="dim: got 8, want a multiple of 16; use int8"):
        install_kv_eviction(model, **SIZES, codec="int4")
    assert not has_hooks(model)


def test_a_model_without_known_attention_is_refused() -> None:
    with pytest.raises(UserInputError, match=r"got Linear.*LlamaAttention"):
        install_kv_eviction(nn.Linear(2, 2), **SIZES)


def test_a_part_of_a_model_is_refused() -> None:
    model = tiny_lm("llama")
    with pytest.raises(UserInputError, match="one whole model"):
        install_kv_eviction(model.model.layers[0], **SIZES)


def test_layers_with_a_window_of_their_own_are_refused() -> None:
    window: dict[str, Any] = {
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 0,
        "layer_types": None,
    }
    model = tiny_lm("qwen2", **window)
    with pytest.raises(UserInputError, match="use_sliding_window=False"):
        install_kv_eviction(model, **SIZES)


def test_a_second_install_is_refused_and_the_first_stays() -> None:
    model = tiny_lm("llama")
    install_kv_eviction(model, **SIZES)
    for part in (model, model.model):
        with pytest.raises(UserInputError, match="remove_kv_eviction"):
            install_kv_eviction(part, **SIZES)
    remove_kv_eviction(model)
    assert not has_hooks(model)


def test_what_is_not_installed_cannot_be_removed() -> None:
    with pytest.raises(UserInputError, match="install_kv_eviction"):
        remove_kv_eviction(tiny_lm("llama"))


def test_other_classes_of_cache_are_refused_untouched() -> None:
    model = tiny_lm("llama")
    install_kv_eviction(model, **SIZES)
    static = StaticCache(config=model.config, max_cache_len=32)
    both = EncoderDecoderCache(DynamicCache(), DynamicCache())
    for cache, name in ((static, "StaticCache"), (both, "EncoderDecoderCache")):
        with pytest.raises(UserInputError, match=rf"{name}.*pass DynamicCache\(\)"):
            model(prompt(12), past_key_values=cache)
        assert cache.get_seq_length() == 0
    with pytest.raises(UserInputError, match="leave cache_implementation out"):
        model.generate(prompt(12), max_new_tokens=2, cache_implementation="static")


def test_a_cache_that_nobody_watched_is_refused_untouched() -> None:
    model, cache = tiny_lm("llama"), DynamicCache()
    model(prompt(12), past_key_values=cache)
    install_kv_eviction(model, **SIZES)
    with pytest.raises(UserInputError, match=r"empty DynamicCache\(\)"):
        model(prompt(1), past_key_values=cache)
    assert cache.get_seq_length() == 12


def test_a_cache_cannot_go_on_after_remove_nor_under_another_install() -> None:
    model, cache = tiny_lm("llama"), DynamicCache()
    install_kv_eviction(model, **SIZES)
    model(prompt(12), past_key_values=cache)
    remove_kv_eviction(model)
    with pytest.raises(CacheError, match="new cache"):
        model(prompt(1), past_key_values=cache)
    install_kv_eviction(model, budget=1, n_sink=1, n_recent=1)
    with pytest.raises(UserInputError, match=r"empty DynamicCache\(\)"):
        model(prompt(1), past_key_values=cache)
    assert cache.get_seq_length() == 12
    assert cache.layers[0].num_rows == 8


def test_a_mask_that_counts_rows_instead_of_tokens_is_refused() -> None:
    model, cache = tiny_lm("llama"), DynamicCache()
    install_kv_eviction(model, **SIZES)
    model(prompt(12), past_key_values=cache)
    with pytest.raises(CacheError, match=r"got 9 columns, want 13.*lengthen the mask"):
        model(prompt(1), past_key_values=cache, attention_mask=torch.zeros(1, 1, 1, 9))
    assert cache.get_seq_length() == 12


def test_what_was_evicted_cannot_be_cropped_back() -> None:
    model, cache = tiny_lm("llama"), DynamicCache()
    install_kv_eviction(model, **SIZES)
    model(prompt(12), past_key_values=cache)
    assert not cache.is_croppable
    with pytest.raises(UnsupportedError, match="without an assistant"):
        cache.crop(-2)


def test_a_step_that_failed_between_layers_asks_for_a_new_cache_and_takes_no_more_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("out of memory")

    model, cache = tiny_lm("llama"), DynamicCache()
    install_kv_eviction(model, **SIZES)
    model(prompt(12), past_key_values=cache)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
        patch.setattr(model.model.layers[0].mlp, "forward", fail)
        model(prompt(1), past_key_values=cache)
    for _ in range(2):
        says = "some layers have seen 12 tokens and others 13.*half-way; start a new cache"
        with pytest.raises(CacheError, match=says):
            model(prompt(1), past_key_values=cache)
        assert [layer.num_seen for layer in cache.layers] == [13, 12]
    model(prompt(12), past_key_values=DynamicCache())
