"""Which layers cache rows, and how far back they see, is read from a `config.json` or refused.

transformers writes a kind for every layer, or leaves it to a rule of the model: both are read
here, and a hybrid model with another rule is named, never taken for one whose layers all attend.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scope_contracts.errors import UserInputError, mismatch, shown

_ATTEND = ("full_attention", "attention", "indexed_attention", "deepseek_sparse_attention")
_WINDOWED = "sliding_attention"
_WITH_STATE = ("linear_attention", "mamba", "mamba2", "recurrent", "conv")
_WITHOUT = ("moe", "mlp")
"""Kinds of layers that cache nothing."""
_LETTERS = {"*": "attention", "M": "mamba", "-": "mlp", "E": "moe"}
"""Of NVIDIA's Nemotron-H."""
_PATTERN_OF = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4}
"""Where every so many-th layer sees all and the model does not write it."""
_WINDOW_EVERYWHERE = ("mistral", "ministral", "mixtral", "phi3", "phimoe", "starcoder2", "moshi")
"""Where a window, if there is one, is that of every layer."""
_JAMBA_OFFSET = 4
"""Where the model does not write it."""
_OTHER_RULES = (
    "attn_layer",
    "full_attn",
    "global_attn",
    "layer_group",
    "cross_attention_layers",
    "conv_L_cache",
    "cca_time",
    "linear_num",
    "linear_head",
    "linear_key",
    "mamba",
    "ssm",
    "hybrid",
    "linear_attn",
    "recurrent",
    "block_types",
    "attn_type",
    "attention_types",
    "attention_chunk",
    "lru_width",
    "rwkv",
)
"""Parts of names that only models have whose layers differ."""
MOST = 1 << 31
"""No size of a model is larger."""
_MOST_LAYERS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CachingLayers:
    """Layers that cache rows or keep a state."""

    num_layers: int
    windows: tuple[int | None, ...]
    """Of those that attend: tokens each sees, its own included; None sees all."""


def size_in(raw: Mapping[str, Any], name: str, *, most: int = MOST, least: int = 1) -> int:
    """A whole number of a `config.json`.

    Raises `UserInputError` where there is none, or it is out of bounds.
    """
    value = raw.get(name)
    if type(value) is not int or not least <= value <= most:
        raise UserInputError(mismatch(name, got=value, want=f"a whole number of {least} to {most}"))
    return value


def refuse_parts(raw: Mapping[str, Any], parts: Sequence[str], what: str) -> None:
    """Raises `UserInputError` where an entry is set that has one of `parts` in its name."""
    for key, value in raw.items():
        if value and any(part in key for part in parts):
            raise UserInputError(f"{shown(key)} {what} is not known")


def caching_layers(raw: Mapping[str, Any]) -> CachingLayers:
    """The layers that a transformers `config.json` describes.

    Raises:
        UserInputError: a size or a kind is not one, no layer attends, or the rule by which layers
            differ is not known here; it names the entry.
    """
    num_layers = size_in(raw, "num_hidden_layers", most=_MOST_LAYERS)
    name, kinds = _kinds(raw, num_layers)
    known = (*_ATTEND, _WINDOWED, *_WITH_STATE, *_WITHOUT)
    if len(kinds) != num_layers or not all(kind in known for kind in kinds):
        want = f"{num_layers} of {', '.join(known)}"
        raise UserInputError(mismatch(name, got=kinds, want=want))
    windows = tuple(
        _window(raw) if kind == _WINDOWED else None
        for kind in kinds
        if kind in _ATTEND or kind == _WINDOWED
    )
    if not windows:
        raise UserInputError(mismatch(name, got=kinds, want="a layer that attends"))
    return CachingLayers(num_layers=sum(kind not in _WITHOUT for kind in kinds), windows=windows)


def _kinds(raw: Mapping[str, Any], num_layers: int) -> tuple[str, Sequence[object]]:
    """A kind for every layer, and the entry that says so."""
    for name in ("layer_types", "layers_block_type"):
        if raw.get(name) is not None:
            return name, _listed(raw, name)
    layers = range(num_layers)
    if (pattern := raw.get(name := "hybrid_override_pattern")) is not None:
        return name, [_LETTERS.get(letter, letter) for letter in str(pattern)]
    name = "attn_layer_period"
    if raw.get("model_type") == "jamba" and raw.get(name) is not None:  # others count otherwise
        period = size_in(raw, name)
        offset = size_in({"attn_layer_offset": _JAMBA_OFFSET, **raw}, "attn_layer_offset", least=0)
        return name, _where([layer % period == offset for layer in layers])
    if raw.get(name := "attn_layer_indices") is not None:
        chosen = _listed(raw, name)
        return name, _where([layer in chosen for layer in layers])
    if raw.get(name := "full_attention_interval") is not None:
        interval = size_in(raw, name)
        return name, _where([(layer + 1) % interval == 0 for layer in layers])
    refuse_parts(raw, _OTHER_RULES, "is of a model whose layers differ, and by what rule")
    return _by_window(raw, num_layers)


def _by_window(raw: Mapping[str, Any], num_layers: int) -> tuple[str, Sequence[object]]:
    """Layers of a model that has nothing but attention."""
    name, layers = "sliding_window", range(num_layers)
    model = raw.get("model_type")
    is_qwen = str(model).startswith("qwen")  # which writes a window that it does not use
    if raw.get(name) is None or not raw.get("use_sliding_window", not is_qwen):
        return name, _where([True] * num_layers)
    pattern = raw.get("sliding_window_pattern") or _PATTERN_OF.get(str(model))
    if pattern is not None:
        pattern = size_in({"sliding_window_pattern": pattern}, "sliding_window_pattern")
        sees_all = [(layer + 1) % pattern == 0 for layer in layers]
    elif raw.get("max_window_layers") is not None:
        first = size_in(raw, "max_window_layers", least=0)
        sees_all = [layer < first for layer in layers]
    elif model not in (None, *_WINDOW_EVERYWHERE):
        got = f"{shown(raw[name])} of a {shown(model)} model"
        raise UserInputError(f"{name}: got {got}, and which layers have it is not known")
    else:
        sees_all = [False] * num_layers
    return name, _where(sees_all, otherwise=_WINDOWED)


def _where(sees_all: Sequence[bool], *, otherwise: str = "linear_attention") -> list[str]:
    return ["full_attention" if sees else otherwise for sees in sees_all]


def _window(raw: Mapping[str, Any]) -> int | None:
    if raw.get("use_sliding_window") is False:
        return None
    return size_in(raw, "sliding_window")


def _listed(raw: Mapping[str, Any], name: str) -> list[object]:
    value = raw[name]
    if not isinstance(value, list):
        raise UserInputError(mismatch(name, got=value, want="a list with an entry for each layer"))
    return value
