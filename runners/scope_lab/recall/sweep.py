"""Who still finds the needle: systems that keep equally many rows answer the same texts.

Texts are fed in pieces, as a stream or a chunked prefill would, so the cache is bounded at every
moment: a policy chooses before it knows the question. All of it follows from one seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from scope_lab.recall.held import bytes_held
from scope_lab.recall.language import Text
from scope_lab.recall.systems import EVICTING, opened
from scope_lab.recall.tasks import Task, draw_task

DEPTHS = (0.0, 0.25, 0.5, 0.75, 0.9)
PIECE_TOKENS = 16
SWEEP_SEED = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Right answers of one system on one task at one length, by depth of the asked fact."""

    system: str
    task: Task
    length: int
    capacity: int | None
    """Rows a layer keeps; None is all."""
    right: tuple[tuple[float, float], ...]
    """`(depth, share of right answers)`."""
    peak_bytes: int
    """The most that the cache held of a text and copied for a layer, while attention ran."""

    @property
    def accuracy(self) -> float:
        """Over all depths."""
        return sum(share for _, share in self.right) / len(self.right)


def measure_cell(
    model: Any,
    *,
    system: str,
    task: Task,
    length: int,
    capacity: int | None,
    num_texts: int,
    depths: Sequence[float] = DEPTHS,
) -> Cell:
    """Answer `num_texts` texts a depth; every system gets the same ones.

    Raises:
        UserInputError: the system, its rows, or the length for this task cannot be used.
    """
    rng = np.random.default_rng([SWEEP_SEED, length, list(Task).index(task)])
    texts = [draw_task(task, length, depth, rng) for depth in depths for _ in range(num_texts)]
    capacity = capacity if system in EVICTING else None
    size = {"batch": len(texts), "length": length}
    with opened(model, system, capacity=capacity, **size) as cache, bytes_held(model) as held:
        shares = right_answers(model, texts, cache=cache)
    by_depth = np.array(shares).reshape(len(depths), num_texts).mean(axis=1)
    return Cell(
        system=system,
        task=task,
        length=length,
        capacity=capacity,
        right=tuple(zip(depths, by_depth.tolist(), strict=True)),
        peak_bytes=max(held) // len(texts),
    )


@torch.inference_mode()
def right_answers(
    model: Any, texts: Sequence[Text], *, piece_tokens: int = PIECE_TOKENS, cache: Any = None
) -> list[float]:
    """Share of right answers of every text; texts are equally long.

    True answers are fed whatever the model says, so one mistake does not spoil the next answer.
    `cache` is what `systems.opened` gave: empty, or None for transformers' own.
    """
    tokens = torch.from_numpy(np.stack([text.tokens for text in texts]))
    guesses = []
    for piece in tokens.split(piece_tokens, dim=1):
        out = model(piece, past_key_values=cache, use_cache=True)
        guesses.append(out.logits.argmax(-1))
        cache = out.past_key_values
    is_right = torch.cat(guesses, dim=1)[:, :-1] == tokens[:, 1:]
    return [
        float(np.mean([bool(row[asked_at]) for asked_at in text.questions]))
        for row, text in zip(is_right, texts, strict=True)
    ]
