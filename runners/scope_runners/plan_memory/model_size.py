"""How many weights a rank holds follows from a model's sizes, before any file is opened."""

from dataclasses import dataclass

from scope_contracts.errors import UserInputError, mismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class WanSize:
    """Sizes of a Wan-architecture transformer, named as in diffusers' `config.json`.

    Raises `UserInputError` for a size below 1.
    """

    num_layers: int
    num_attention_heads: int
    attention_head_dim: int
    ffn_dim: int
    in_channels: int = 16
    out_channels: int = 16
    text_dim: int = 4096
    freq_dim: int = 256

    def __post_init__(self) -> None:
        for name in self.__slots__:
            size: int = getattr(self, name)
            if size < 1:
                raise UserInputError(mismatch(name, got=size, want="at least 1"))

    @property
    def dim(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    def num_weights(self, tp_degree: int) -> int:
        """Weights that each of `tp_degree` ranks holds: heads and feed-forward are shared.

        Raises `UserInputError` when heads or feed-forward channels cannot be shared evenly.
        """
        if tp_degree < 1 or self.num_attention_heads % tp_degree or self.ffn_dim % tp_degree:
            want = f"a divisor of {self.num_attention_heads} heads and {self.ffn_dim} ffn channels"
            raise UserInputError(mismatch("tp", got=tp_degree, want=want, fix="change --tp"))
        return self.num_layers * self._layer(tp_degree) + self._around_the_layers()

    def _layer(self, tp_degree: int) -> int:
        """Two attentions, a feed-forward, a norm with bias, and the modulation table."""
        dim, local, ffn = self.dim, self.dim // tp_degree, self.ffn_dim // tp_degree
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
