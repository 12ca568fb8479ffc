"""H2O on a transformers model: hooks around its attention watch, and shorten the cache afterwards.

The model's own forward is not touched, and what was accumulated lives in the cache it belongs to,
so two caches never share a score. Taken from "H2O: Heavy-Hitter Oracle" (Zhang et al. 2023).
"""

import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from scope_contracts.errors import CacheError, UserInputError, mismatch
from scope_contracts.row_format import CodecKind
from scope_rt.collectives import Collectives, SoloCollectives
from scope_rt.kv_cache.codec import codec_for
from scope_rt.kv_cache.policy import EvictionPolicy, HeavyHitters
from scope_rt.lm.eviction_layer import EvictingLayer, EvictionSettings
from scope_rt.lm.model_rows import model_rows

LATENT_ATTENTION = (DeepseekV3Attention,)
"""Caches one latent and one RoPE key for all heads."""
HEAD_ATTENTION = (LlamaAttention, Qwen2Attention, Qwen3Attention)
"""Caches keys and values of every K/V head."""


def install_kv_eviction(
    model: nn.Module,
    budget: int,
    n_sink: int,
    n_recent: int,
    evict_every: int = 1,
    *,
    per_head: bool = False,
    codec: CodecKind | str = CodecKind.IDENTITY,
    collectives: Collectives | None = None,
) -> None:
    """Keep `n_sink` first, `n_recent` last and the `budget` most attended tokens in every layer.

    Applies to every `DynamicCache` that starts empty from now on: `model.generate()`, or a loop of
    `model(ids, past_key_values=cache)`. A step of several tokens (prefill) always evicts; of the
    one-token steps after it every `evict_every`-th does, so that between steps a layer holds at
    most `n_sink + budget + n_recent + evict_every - 1` rows. While one step's attention runs there
    is one row more, and a prefill attends to all of its tokens before any leaves.

    Args:
        per_head: every K/V head keeps tokens of its own.
        codec: how the rows that stay are stored; every step sees them as they are stored. Latents
            (DeepseekV3) are kept as they are.
        collectives: the tensor-parallel group, where this model holds a share of the heads. All
            ranks must feed the same tokens. Scores are summed over it before rows are chosen.

    Raises:
        UserInputError: the sizes, the model or its attention cannot be used; nothing was touched.
    """
    policy = HeavyHitters(
        budget=budget, num_sink=n_sink, num_recent=n_recent, evict_every=evict_every
    )
    install_eviction_policy(model, policy, per_head=per_head, codec=codec, collectives=collectives)


def install_eviction_policy(
    model: nn.Module,
    policy: EvictionPolicy,
    *,
    per_head: bool = False,
    codec: CodecKind | str = CodecKind.IDENTITY,
    collectives: Collectives | None = None,
) -> None:
    """As `install_kv_eviction`, with any policy."""
    layers = _attention_layers(model)
    for layer in layers:
        _require_eager(layer)
        if per_head and isinstance(layer, LATENT_ATTENTION):
            raise UserInputError(
                f"per_head: {type(layer).__name__} caches one latent for all heads, so heads "
                "cannot keep different tokens; leave per_head off"
            )
        if _tap_of(layer) is not None:
            raise UserInputError(
                "the model has KV eviction already; call remove_kv_eviction(model) first"
            )
    try:
        codec = CodecKind(codec)  # a user's word for it is as good
    except ValueError as error:
        want = f"one of {', '.join(CodecKind)}"
        raise UserInputError(mismatch("codec", got=str(codec), want=want)) from error
    if codec is not CodecKind.IDENTITY:
        model_rows(model, codec=codec)  # refuses rows that this codec cannot store
    settings = EvictionSettings(
        policy=policy,
        per_head=per_head,
        codec=codec_for(codec, layers[0].o_proj.weight.device),
        collectives=collectives or SoloCollectives(),
    )
    installation = _Installation(settings, len(layers))
    for layer in layers:
        _Tap(installation, layer)


def remove_kv_eviction(model: nn.Module) -> None:
    """Make the model what it was. Caches filled meanwhile cannot be continued.

    Raises:
        UserInputError: it has no eviction.
    """
    for layer, tap in _taps(model):
        tap.remove(layer)


class _Installation:
    """What the taps of one model share: settings, and the caches that are in use."""

    def __init__(self, settings: EvictionSettings, num_layers: int) -> None:
        self._settings, self._num_layers = settings, num_layers
        self._caches: weakref.WeakSet[Any] = weakref.WeakSet()

    def next_layer(self, cache: Cache, layer_idx: int) -> EvictingLayer:
        """The cache's layer, whose attention is about to run.

        Raises:
            CacheError: a step ended before all layers had its tokens; nothing was changed.
            UserInputError: as `layer`.
        """
        layer = self.layer(cache, layer_idx)
        if layer_idx == 0:
            seen = [each.num_seen for each in cache.layers]
            if min(seen) < max(seen):
                raise CacheError(
                    f"past_key_values: some layers have seen {min(seen)} tokens and others "
                    f"{max(seen)}, for a step failed half-way; start a new cache"
                )
        return layer

    def layer(self, cache: Cache, layer_idx: int) -> EvictingLayer:
        """The cache's layer; an empty cache is made one that evicts.

        Raises:
            UserInputError: it is another class of cache, or was filled without scores.
        """
        if cache not in self._caches:
            self._adopt(cache)
        evicting: EvictingLayer = cache.layers[layer_idx]
        return evicting

    def _adopt(self, cache: Cache) -> None:
        _require_dynamic(cache)
        if not all(self._is_ours(layer) for layer in cache.layers) or not cache.layers:
            _require_unfilled(cache)
            cache.layers = [EvictingLayer(self._settings) for _ in range(self._num_layers)]
        self._caches.add(cache)

    def _is_ours(self, layer: object) -> bool:  # a copy of such a cache is
        return isinstance(layer, EvictingLayer) and layer.settings is self._settings


class _Tap:
    """The pair of hooks around one attention layer."""

    def __init__(self, installation: _Installation, attention: nn.Module) -> None:
        self.installation = installation
        self._handles: tuple[RemovableHandle, ...] = (
            attention.register_forward_pre_hook(self._before, with_kwargs=True),
            attention.register_forward_hook(self._after, with_kwargs=True),
        )
        vars(attention)[_TAP] = self

    def remove(self, attention: nn.Module) -> None:
        for handle in self._handles:
            handle.remove()
        del vars(attention)[_TAP]

    def _before(
        self, attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        cache = kwargs["past_key_values"]
        if cache is None:
            return args, kwargs
        _require_eager(attention)
        latent = isinstance(attention, LATENT_ATTENTION)
        mask = self.installation.next_layer(cache, attention.layer_idx).announce(
            kwargs["hidden_states"],
            kwargs["attention_mask"],
            cached_heads=1 if latent else attention.k_proj.out_features // attention.head_dim,
            group_size=attention.num_key_value_groups,
        )
        return args, kwargs | {"attention_mask": mask}

    def _after(
        self,
        attention: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: tuple[Tensor, Tensor],
    ) -> None:
        cache = kwargs["past_key_values"]
        if cache is not None:
            self.installation.layer(cache, attention.layer_idx).observe(output[1])


_TAP = "kv_eviction_tap"


def _tap_of(attention: nn.Module) -> _Tap | None:
    return vars(attention).get(_TAP)


def _taps(model: nn.Module) -> list[tuple[nn.Module, _Tap]]:
    found = [(module, tap) for module in model.modules() if (tap := _tap_of(module)) is not None]
    if not found:
        raise UserInputError("the model has no KV eviction; call install_kv_eviction(model) first")
    return found


def _attention_layers(model: nn.Module) -> list[Any]:
    supported = LATENT_ATTENTION + HEAD_ATTENTION
    layers: list[Any] = [module for module in model.modules() if isinstance(module, supported)]
    if not layers:
        names = ", ".join(kind.__name__ for kind in supported)
        raise UserInputError(
            f"model: got {type(model).__name__}, which has none of the attention layers known "
            f"here ({names}); use a model that has"
        )
    config = layers[0].config
    if len(layers) != config.num_hidden_layers or {layer.layer_idx for layer in layers} != set(
        range(len(layers))
    ):
        raise UserInputError(
            f"model: got {len(layers)} attention layers for {config.num_hidden_layers} layers, "
            "want one each; install on one whole model"
        )
    if any(vars(layer).get("sliding_window") is not None for layer in layers):
        raise UserInputError(
            "model: some layers have a sliding window, which drops tokens on its own; set "
            "use_sliding_window=False in its configuration"
        )
    return layers


def _require_eager(attention: Any) -> None:
    used = attention.config._attn_implementation
    if used != "eager":
        fix = 'load the model with attn_implementation="eager": no other returns probabilities'
        raise UserInputError(mismatch("attention", got=used, want="eager", fix=fix))


def _require_dynamic(cache: Cache) -> None:
    got = type(cache).__name__
    if type(cache) is DynamicCache and cache.offloading:
        got = "offloaded DynamicCache"
    if got != "DynamicCache":
        fix = "pass DynamicCache(), or leave cache_implementation out"
        raise UserInputError(mismatch("past_key_values", got=got, want="DynamicCache", fix=fix))


def _require_unfilled(cache: Cache) -> None:
    if any(type(layer) is not DynamicLayer or layer.get_seq_length() for layer in cache.layers):
        raise UserInputError(
            "past_key_values: got a cache that was filled without this eviction, so nobody "
            "watched what its tokens received; start with an empty DynamicCache()"
        )
