"""A transformer folder of hundreds of megabytes that occupies almost no disk; not a test itself."""

import json
from math import prod
from pathlib import Path

import torch

from scope_rt.models.causal_wan import CausalWanModel
from scope_rt.models.config import CausalWanConfig

CONFIG = CausalWanConfig(
    num_attention_heads=8,
    attention_head_dim=128,
    in_channels=16,
    out_channels=16,
    text_dim=256,
    freq_dim=256,
    ffn_dim=4096,
    num_layers=12,
)


def write_sparse_transformer(folder: Path) -> Path:
    """All weights of `CONFIG` in fp16, zeros that were never written."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(CONFIG.to_json())
    with torch.device("meta"):
        shapes = {name: list(p.shape) for name, p in CausalWanModel(CONFIG).named_parameters()}
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + prod(shape) * 2
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "diffusion_pytorch_model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder
