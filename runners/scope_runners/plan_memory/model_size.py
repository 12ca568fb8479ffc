"""How many weights a rank holds follows from a model's sizes, before any file is opened."""

from dataclasses import dataclass, fields
from typing import Self

from scope_contracts.errors import UserInputError, mismatch
from scope_rt.models.config import CausalWanConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class WanSize(CausalWanConfig):
    """Sizes of a Wan-architecture transformer; those that all published ones share by default.

    Raises `UserInputError` for a size below 1.
    """

    in_channels: int = 16
    out_channels: int = 16
    text_dim: int = 4096
    freq_dim: int = 256

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self) if field.type is int):
            size: int = getattr(self, name)
            if size < 1:
                raise UserInputError(mismatch(name, got=size, want="at least 1"))

    @classmethod
    def of(cls, config: CausalWanConfig) -> Self:
        """Those of a model's folder."""
        return cls(**{field.name: getattr(config, field.name) for field in fields(config)})

    def channels(self, tp_degree: int) -> int:
        """Of the heads of each of `tp_degree` ranks, zeros that fill the last one up included."""
        return self.heads_of_rank(tp_degree) * self.attention_head_dim

    def num_weights(self, tp_degree: int) -> int:
        """Weights that each of `tp_degree` ranks holds: heads and feed-forward are shared.

        Raises `UserInputError` where that leaves a rank without any.
        """
        self.check_degree(tp_degree)
        return self.num_layers * self._layer(tp_degree) + self._around_the_layers()

    def _layer(self, tp_degree: int) -> int:
        """Two attentions, a feed-forward, a norm with bias, and the modulation table."""
        dim, local, ffn = self.dim, self.channels(tp_degree), self.channels_of_rank(tp_degree)
        attention = 4 * dim * local + 3 * local + dim + 2 * local
        feed_forward = 2 * dim * ffn + ffn + dim
        return 2 * attention + feed_forward + 2 * dim + 6 * dim

    def _around_the_layers(self) -> int:
        """Patch embedding, time and text embedders, and the head: whole on every rank."""
        dim, patch = self.dim, 4
        embed = patch * self.in_channels * dim + dim
        time = self.freq_dim * dim + dim + dim * dim + dim + 6 * dim * dim + 6 * dim
        text = self.text_dim * dim + dim + dim * dim + dim
        head = dim * patch * self.out_channels + patch * self.out_channels + 2 * dim
        return embed + time + text + head


def t5_encoder_weights(
    *, vocabulary: int, dim: int, ffn_dim: int, num_layers: int, heads: int, head_dim: int
) -> int:
    """Weights of a gated T5 encoder with position biases in every layer (UMT5, 2023)."""
    buckets = 32
    attention = 4 * dim * heads * head_dim + buckets * heads + dim
    return vocabulary * dim + num_layers * (attention + 3 * dim * ffn_dim + dim) + dim
