"""Only answers are learned, for only they can be known; hints say early on how to know them.

Recall in two layers is an induction circuit (Olsson et al., 2022): the first layer writes into each
value which key stood before it, the second looks for the value whose key was asked. Both halves are
useless without the other, so a model of this size finds them late. The hints ask for each half by
itself: name the key from the first layer's output, and look at the value in the last layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from scope_lab.recall.language import ASK, FACT, Text


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens `[B, T]` of equally long texts, and the place and answer of every question, `[Q]`."""

    tokens_BT: Tensor
    rows: Tensor
    columns: Tensor

    @classmethod
    def of(cls, texts: Sequence[Text]) -> "Batch":
        return cls(
            tokens_BT=torch.from_numpy(np.stack([text.tokens for text in texts])),
            rows=torch.tensor([row for row, text in enumerate(texts) for _ in text.questions]),
            columns=torch.tensor([column for text in texts for column in text.questions]),
        )

    @property
    def answers(self) -> Tensor:
        return self.tokens_BT[self.rows, self.columns + 1]


@dataclass(frozen=True, slots=True)
class Losses:
    """Cross-entropy of the answers and the sum of both hints, in nats; the share of right ones."""

    answers: Tensor
    hints: Tensor
    right: float


def losses(model: Any, batch: Batch, *, hinted: bool) -> Losses:
    """One pass over a batch. Hints need eager attention; without them they are 0."""
    asked = batch.rows, batch.columns
    out = model.model(
        batch.tokens_BT,
        use_cache=False,
        output_hidden_states=hinted,
        output_attentions=hinted,
    )
    logits = model.lm_head(out.last_hidden_state[asked])
    hints = torch.zeros(())
    if hinted:
        attention_QT = out.attentions[-1].mean(dim=1)[asked]
        hints = _name_the_key(model, out.hidden_states[1], batch)
        hints = hints + _look_at_the_value(attention_QT, batch)
    return Losses(
        answers=F.cross_entropy(logits, batch.answers),
        hints=hints,
        right=(logits.argmax(-1) == batch.answers).float().mean().item(),
    )


def _name_the_key(model: Any, hidden_BTC: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy of the key at every value, predicted from the first layer's output."""
    values = keys_of_values(batch.tokens_BT)
    at = torch.where(values >= 0)
    return F.cross_entropy(model.lm_head(model.model.norm(hidden_BTC[at])), values[at])


def _look_at_the_value(attention_QT: Tensor, batch: Batch) -> Tensor:
    """-log of the attention that questions pay to earlier values of their key."""
    keys = batch.tokens_BT[batch.rows, batch.columns]
    earlier = torch.arange(batch.tokens_BT.shape[1]) < batch.columns[:, None]
    matches_QT = earlier & (keys_of_values(batch.tokens_BT)[batch.rows] == keys[:, None])
    return -(attention_QT * matches_QT).sum(dim=-1).clamp_min(1e-6).log().mean()


def keys_of_values(tokens_BT: Tensor) -> Tensor:
    """For each value of a fact or an answer its key, -1 elsewhere."""
    keys = torch.full_like(tokens_BT, -1)
    marks = (tokens_BT[:, :-2] == FACT) | (tokens_BT[:, :-2] == ASK)
    keys[:, 2:] = torch.where(marks, tokens_BT[:, 1:-1], -1)
    return keys
