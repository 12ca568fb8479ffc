"""What the runtime asks of a text encoder: prompts in, conditioning of one fixed shape out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSizes:
    """What every rank must know of a text encoder that only rank0 loads."""

    text_len: int
    text_dim: int


class TextEncoder(Protocol):
    """Prompts to embeddings; equal prompts give equal bits."""

    @property
    def text_len(self) -> int:
        """Tokens of an embedding, padding included."""
        ...

    @property
    def text_dim(self) -> int:
        """Numbers per token."""
        ...

    def __call__(self, prompts: Sequence[str], /) -> Tensor:
        """Embeddings `[B, text_len, text_dim]` of B prompts.

        Blocks until they are there: it runs on rank0, on the thread of whoever changes the prompt,
        one call at a time.

        Raises:
            UserInputError: a prompt cannot be read; the sentence says what to change.
        """
        ...
