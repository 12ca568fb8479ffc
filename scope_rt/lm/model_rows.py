"""What a model's cache holds of one token follows from its config, before any cache exists."""

from dataclasses import dataclass
from typing import Any

from scope_contracts.errors import UserInputError
from scope_contracts.row_format import CodecKind, RowFormat
from scope_rt.lm.cache.layer_map import AttnLayerMap
from scope_rt.tensors import NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRows:
    """The rows that a language model writes."""

    row_format: RowFormat
    layers: AttnLayerMap
    windows: tuple[int | None, ...]
    """Tokens each attention layer sees, its own included; None sees all."""


def model_rows(model: Any, *, codec: CodecKind = CodecKind.IDENTITY) -> ModelRows:
    """The rows of a transformers model whose layers all attend.

    DeepSeek's latent attention caches the normalised latent and the rotated key that all heads
    share (DeepSeek-V2, section 2.1), as transformers does since version 5; others cache K and V.

    Raises:
        UserInputError: a layer keeps something else than rows, or the codec does not fit.
    """
    config = model.config.to_dict()
    num_layers, dtype = config["num_hidden_layers"], NAMES[model.dtype]
    if config.get("kv_lora_rank"):
        row_format = RowFormat.latent(
            rank=config["kv_lora_rank"], rope_dim=config["qk_rope_head_dim"], dtype=dtype
        )
        if codec is not CodecKind.IDENTITY:
            row_format = RowFormat(planes=row_format.planes, dtype=dtype, codec=codec)
    else:
        row_format = RowFormat.full(
            heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim")
            or config["hidden_size"] // config["num_attention_heads"],
            dtype=dtype,
            codec=codec,
        )
    return ModelRows(
        row_format=row_format,
        layers=AttnLayerMap.all_of(num_layers),
        windows=_windows(config, num_layers),
    )


def _windows(config: dict[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """By layer; transformers writes a kind for each, or one window for all."""
    window = config.get("sliding_window")
    known = {"full_attention": None, "sliding_attention": window}
    kinds = (
        config.get("layer_types")
        or ["sliding_attention" if window else "full_attention"] * num_layers
    )
    if strange := sorted(set(kinds) - set(known)):
        raise UserInputError(
            f"layers of kind {', '.join(strange)} keep no rows of every token; this cache takes "
            "models whose layers are full_attention or sliding_attention"
        )
    return tuple(known[kind] for kind in kinds)
