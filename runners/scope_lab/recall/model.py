"""The embedded recall model is an ordinary Llama that transformers loads from its folder."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).parent / "weights"
WEIGHTS = "model.safetensors"
_TIED, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
MAX_LENGTH = 512
"""Tokens of the longest texts it was trained on."""


def recall_config(vocab_size: int) -> LlamaConfig:
    """Two layers, which is what induction takes: one looks one token back, one looks up."""
    return LlamaConfig(
        architectures=[LlamaForCausalLM.__name__],
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4 * MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=None,
    )


def new_recall_model(vocab_size: int, *, seed: int) -> Any:
    """An untrained `LlamaForCausalLM`."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(recall_config(vocab_size))


def load_recall_model(folder: Path = FOLDER, *, attention: str = "eager") -> Any:
    """The trained model in float32; eviction by attention mass needs `eager` attention."""
    config = LlamaConfig.from_pretrained(
        folder, attn_implementation=attention, dtype=torch.float32, local_files_only=True
    )
    model = LlamaForCausalLM(config)
    weights = load_file(folder / WEIGHTS)
    weights[_TIED] = weights[_EMBEDDING]
    model.load_state_dict(weights)
    return model.eval()


def save_recall_model(model: Any, folder: Path) -> None:
    """`config.json` and float16 weights, as `LlamaForCausalLM.from_pretrained` reads them."""
    weights = {name: w.half() for name, w in model.state_dict().items() if name != _TIED}
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
