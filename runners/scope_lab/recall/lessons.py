"""Texts to learn recall from: short or long, few or many facts, dense or sparse questions."""

import numpy as np

from scope_lab.recall.language import (
    EVENT_TOKENS,
    NUM_KEYS,
    Text,
    compose,
    draw_facts,
    question,
)


def draw_quiz(length: int, rng: np.random.Generator) -> Text:
    """Facts in the first half of a text, and each of them asked once at the end.

    Nothing can be copied from another answer, so the only way to know one is to look it up.
    """
    count = int(rng.integers(2, length // 8 + 1))
    facts = draw_facts(count, 0.5 * rng.random(count), rng)
    questions = [question(facts[i], 1.0) for i in rng.permutation(count)]
    return compose(length, [*facts, *questions], rng)


def draw_lesson(length: int, rng: np.random.Generator) -> Text:
    """A text with few or many facts, each asked never, once or often; half of the questions end it.

    One text in four is a haystack: a fact or two, and one question at the end.
    """
    haystack = rng.random() < 0.25
    most = 2 if haystack else min(NUM_KEYS, length // 8)
    facts = draw_facts(count := int(rng.integers(1, most + 1)), 0.9 * rng.random(count), rng)
    room = (length - 1) // EVENT_TOKENS - count
    asked = rng.integers(0, count, 1 if haystack else int(rng.integers(1, room + 1)))
    questions = [
        question(facts[i], 1.0 if late else float(rng.uniform(facts[i].depth, 1.0)))
        for i, late in zip(asked, haystack | (rng.random(len(asked)) < 0.5), strict=True)
    ]
    return compose(length, [*facts, *questions], rng)
