"""What a UMT5 encoder is: off its tensors' shapes, whose names become those of transformers.

Wan's own file states no size; where a `config.json` states them, it must agree.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from scope_contracts.errors import UserInputError
from scope_rt.tensor_files.fitting import TensorInFile

T = TypeVar("T")
EMBEDDING = "shared.weight"
_TIED = "encoder.embed_tokens.weight"
"""Another name of the embedding, beside it or in its place."""
_BLOCK = r"^blocks\.(\d+)\."
_RENAMES = (
    (r"^token_embedding\.", "shared."),
    (r"^norm\.", "encoder.final_layer_norm."),
    (_BLOCK + r"norm1\.", r"encoder.block.\1.layer.0.layer_norm."),
    (_BLOCK + r"attn\.", r"encoder.block.\1.layer.0.SelfAttention."),
    (
        _BLOCK + r"pos_embedding\.embedding\.",
        r"encoder.block.\1.layer.0.SelfAttention.relative_attention_bias.",
    ),
    (_BLOCK + r"norm2\.", r"encoder.block.\1.layer.1.layer_norm."),
    (_BLOCK + r"ffn\.gate\.0\.", r"encoder.block.\1.layer.1.DenseReluDense.wi_0."),
    (_BLOCK + r"ffn\.fc1\.", r"encoder.block.\1.layer.1.DenseReluDense.wi_1."),
    (_BLOCK + r"ffn\.fc2\.", r"encoder.block.\1.layer.1.DenseReluDense.wo."),
)
"""Original part of a name -> transformers' part."""


def transformers_names(tensors: Mapping[str, T]) -> dict[str, T]:
    """Tensors under transformers' names, whichever they had; the embedding once."""
    renamed = {}
    for name, tensor in tensors.items():
        for original, theirs in _RENAMES:
            name = re.sub(original, theirs, name)
        renamed[name] = tensor
    if (tied := renamed.pop(_TIED, None)) is not None:
        renamed.setdefault(EMBEDDING, tied)
    return renamed


@dataclass(frozen=True, slots=True, kw_only=True)
class Umt5Sizes:
    """Under the names of transformers' `UMT5Config`."""

    vocab_size: int
    d_model: int
    d_kv: int
    d_ff: int
    num_layers: int
    num_heads: int
    relative_attention_num_buckets: int

    @classmethod
    def of(cls, where: Path, tensors: Mapping[str, TensorInFile]) -> Self:
        """Read them off the shapes of `tensors`, under transformers' names.

        Raises:
            UserInputError: these are not the weights of UMT5's encoder; names the tensor.
        """

        def shape_of(name: str) -> tuple[int, int]:
            if name not in tensors:
                raise UserInputError(
                    f"{where} has no tensor {name}, under this or its original name; give the "
                    "encoder of umT5"
                )
            match tensors[name].shape:
                case (int(rows), int(columns)) if rows and columns:
                    return rows, columns
            raise UserInputError(
                f"{where}: {tensors[name].name} is {list(tensors[name].shape)}, want a matrix; "
                "give the encoder of umT5"
            )

        first = "encoder.block.0.layer"
        vocab_size, d_model = shape_of(EMBEDDING)
        num_buckets, num_heads = shape_of(f"{first}.0.SelfAttention.relative_attention_bias.weight")
        inner, _ = shape_of(f"{first}.0.SelfAttention.q.weight")
        d_ff, _ = shape_of(f"{first}.1.DenseReluDense.wi_0.weight")
        blocks = {
            found[1] for name in tensors if (found := re.match(r"encoder\.block\.(\d+)", name))
        }
        return cls(
            vocab_size=vocab_size,
            d_model=d_model,
            d_kv=max(1, inner // num_heads),
            d_ff=d_ff,
            num_layers=len(blocks),
            num_heads=num_heads,
            relative_attention_num_buckets=num_buckets,
        )
