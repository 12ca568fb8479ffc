"""What a text asks of a cache: needles as RULER (Hsieh et al., 2024) hides them, and dialogues.

Every task ends in questions whose answers are counted; the fact behind them stands at a given depth
of the text (0: its start). What differs is what a policy may learn about that fact beforehand.
"""

from enum import StrEnum

import numpy as np

from scope_lab.recall.language import Event, Text, compose, draw_facts, question

DISTRACTORS = 7
AROUND = 0.06
"""Of a text: how far behind a fact its repetition, or an early question about it, stands."""


class Task(StrEnum):
    SINGLE = "single"
    MULTI_KEY = "multi-key"
    MULTI_QUERY = "multi-query"
    STATED_TWICE = "stated twice"
    ASKED_BEFORE = "asked before"
    POPULAR = "popular"


MEANINGS = {
    Task.SINGLE: "one fact in a haystack, asked once at the end",
    Task.MULTI_KEY: "eight facts, one asked at the end",
    Task.MULTI_QUERY: "four facts together, all asked at the end",
    Task.STATED_TWICE: "eight facts, the one asked at the end was stated twice",
    Task.ASKED_BEFORE: "eight facts, the one asked at the end was asked twice early on",
    Task.POPULAR: "eight facts together, two asked over and over; one of the two after a pause",
}
"""What a text of a task holds; eight facts that are not together are spread at random."""


def draw_task(task: Task, length: int, depth: float, rng: np.random.Generator) -> Text:
    """A text of `length` tokens with the asked fact at `depth`; only counted questions are named.

    Raises:
        UserInputError: `length` is too short for the task.
    """
    events, num_counted = _events(task, depth, rng)
    text = compose(length, events, rng)
    return Text(tokens=text.tokens, questions=text.questions[-num_counted:])


def _events(task: Task, depth: float, rng: np.random.Generator) -> tuple[list[Event], int]:
    """Events of the text, and how many of its last questions count."""
    soon = [min(1.0, depth + part * AROUND) for part in (0.5, 1.0)]
    match task:
        case Task.SINGLE:
            facts = draw_facts(1, [depth], rng)
            return [*facts, question(facts[0], 1.0)], 1
        case Task.MULTI_QUERY:
            facts = draw_facts(4, [depth] * 4, rng)
            return [*facts, *(question(facts[i], 1.0) for i in rng.permutation(4))], 4
        case Task.POPULAR:
            facts = draw_facts(1 + DISTRACTORS, [depth] * (1 + DISTRACTORS), rng)
            pause = depth + 0.75 * (1.0 - depth)
            asked = [
                question(facts[i % 2], float(d))
                for i, d in enumerate(np.linspace(depth, pause, 7)[1:])
            ]
            return [*facts, *asked, question(facts[int(rng.integers(2))], 1.0)], 1
        case _:
            facts = draw_facts(1 + DISTRACTORS, [depth, *rng.random(DISTRACTORS)], rng)
            asked_fact = facts[0]
            early: list[Event] = []
            if task is Task.ASKED_BEFORE:
                early = [question(asked_fact, d) for d in soon]
            if task is Task.STATED_TWICE:
                early = [Event(depth=soon[1], key=asked_fact.key, value=asked_fact.value)]
            return [*facts, *early, question(asked_fact, 1.0)], 1
