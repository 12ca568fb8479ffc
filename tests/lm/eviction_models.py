"""Tiny language models with attention peaked enough that choosing matters; not a test itself."""

from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.rounding import in_float64

VOCAB = 48
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
GROUPED: dict[str, Any] = COMMON | {"num_key_value_heads": 2, "head_dim": 8}
LATENT: dict[str, Any] = COMMON | {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
}
KINDS: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**GROUPED)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**GROUPED)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**GROUPED)),
    "deepseek_v3": (DeepseekV3ForCausalLM, DeepseekV3Config(**LATENT)),
}


def tiny_lm(
    kind: str, *, attention: str = "eager", dtype: torch.dtype = torch.float32, **changes: Any
) -> Any:
    """A seeded random model; `changes` go into its configuration. In float64 all of it is."""
    model_class, config = KINDS[kind]
    config = type(config)(**config.to_diff_dict() | changes)
    torch.manual_seed(11)
    model: Any = model_class._from_config(config, attn_implementation=attention).eval().to(dtype)
    if dtype is torch.float64:  # which has no grouped matrix product for the experts
        model.set_experts_implementation("eager")
        model.base_model.forward = in_float64()(model.base_model.forward)
    return model


def prompt(length: int, *, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """Random token ids without padding, `[batch, length]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (batch, length), generator=generator)
