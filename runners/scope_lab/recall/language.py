"""A language of facts and questions in which every answer is decided by one fact before it.

    bos  word word  fact k v  word  ...  ask k v

A question repeats its answer, as a dialogue does, so later questions may copy from earlier ones.
Keys of one text differ; words and values say nothing about keys. Ids are one range a class.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scope_contracts.errors import UserInputError

BOS, FACT, ASK = range(3)
NUM_KEYS = NUM_VALUES = NUM_WORDS = 64
FIRST_KEY = 3
FIRST_VALUE = FIRST_KEY + NUM_KEYS
FIRST_WORD = FIRST_VALUE + NUM_VALUES
VOCAB_SIZE = FIRST_WORD + NUM_WORDS
EVENT_TOKENS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """`fact k v` or `ask k v`, after `depth` (0 to 1) of the text's words."""

    depth: float
    key: int
    value: int
    is_question: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Tokens `[T]`, and where questions stand: `tokens[q]` is a key, `tokens[q + 1]` its answer."""

    tokens: NDArray[np.int64]
    questions: tuple[int, ...]


def compose(length: int, events: Sequence[Event], rng: np.random.Generator) -> Text:
    """A text of `length` tokens: the events in order of depth (then as given), words between them.

    Raises:
        UserInputError: the events do not fit into `length`.
    """
    num_words = length - 1 - EVENT_TOKENS * len(events)
    if num_words < 0:
        fewest = 1 + EVENT_TOKENS * len(events)
        raise UserInputError(f"a text of {len(events)} events: got length {length}, want {fewest}")
    tokens = rng.integers(FIRST_WORD, FIRST_WORD + NUM_WORDS, length)
    tokens[0] = BOS
    questions = []
    for index, event in enumerate(sorted(events, key=lambda event: event.depth)):
        start = 1 + EVENT_TOKENS * index + int(event.depth * num_words)
        mark = ASK if event.is_question else FACT
        tokens[start : start + EVENT_TOKENS] = mark, event.key, event.value
        if event.is_question:
            questions.append(start + 1)
    return Text(tokens=tokens, questions=tuple(questions))


def draw_facts(
    count: int, depths: Sequence[float] | NDArray[np.float64], rng: np.random.Generator
) -> list[Event]:
    """`count` facts about different keys.

    Raises:
        UserInputError: there are not as many keys.
    """
    if count > NUM_KEYS:
        raise UserInputError(f"facts in a text: got {count}, want at most {NUM_KEYS}")
    keys = FIRST_KEY + rng.permutation(NUM_KEYS)[:count]
    values = rng.integers(FIRST_VALUE, FIRST_VALUE + NUM_VALUES, count)
    return [
        Event(depth=float(depth), key=int(key), value=int(value))
        for depth, key, value in zip(depths, keys, values, strict=True)
    ]


def question(fact: Event, depth: float) -> Event:
    """Ask for `fact` at `depth`."""
    return Event(depth=depth, key=fact.key, value=fact.value, is_question=True)
