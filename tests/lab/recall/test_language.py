import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scope_contracts.errors import UserInputError
from scope_lab.recall.language import (
    ASK,
    BOS,
    EVENT_TOKENS,
    FACT,
    FIRST_KEY,
    FIRST_WORD,
    NUM_KEYS,
    VOCAB_SIZE,
    Text,
    compose,
    draw_facts,
    question,
)
from scope_lab.recall.lessons import draw_lesson
from scope_lab.recall.tasks import Task, draw_task

SEEDS = st.integers(0, 2**32 - 1)


def told_before(text: Text, asked_at: int) -> set[int]:
    """Values that facts about the asked key gave before the question."""
    tokens = text.tokens[: asked_at - 1]
    told = np.flatnonzero(tokens == FACT)
    return {int(tokens[at + 2]) for at in told if tokens[at + 1] == text.tokens[asked_at]}


def assert_every_answer_is_decided(text: Text) -> None:
    assert text.questions
    for asked_at in text.questions:
        assert text.tokens[asked_at - 1] == ASK
        assert told_before(text, asked_at) == {int(text.tokens[asked_at + 1])}


@settings(max_examples=40)
@given(length=st.sampled_from([32, 64, 128]), seed=SEEDS)
def test_every_training_answer_is_decided_by_one_fact_before_its_question(
    length: int, seed: int
) -> None:
    text = draw_lesson(length, np.random.default_rng(seed))
    assert text.tokens.shape == (length,)
    assert text.tokens[0] == BOS
    assert text.tokens.max() < VOCAB_SIZE
    assert_every_answer_is_decided(text)


@settings(max_examples=40)
@given(task=st.sampled_from(Task), depth=st.floats(0, 0.9), seed=SEEDS)
def test_every_needle_is_decided_by_its_fact_and_asked_at_the_end(
    task: Task, depth: float, seed: int
) -> None:
    text = draw_task(task, 128, depth, np.random.default_rng(seed))
    assert_every_answer_is_decided(text)
    assert text.questions[-1] == 128 - 2


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.75])
def test_a_needle_is_at_the_requested_depth(depth: float) -> None:
    text = draw_task(Task.SINGLE, 256, depth, np.random.default_rng(3))
    (told,) = np.flatnonzero(text.tokens == FACT)
    assert told == pytest.approx(1 + depth * (256 - 1 - 2 * EVENT_TOKENS), abs=1)


def test_a_popular_fact_is_asked_before_the_pause_and_again_after_it() -> None:
    text = draw_task(Task.POPULAR, 256, 0.0, np.random.default_rng(3))
    (last,) = text.questions
    asked = [int(at) + 1 for at in np.flatnonzero(text.tokens == ASK)]
    before = [at for at in asked[:-1] if text.tokens[at] == text.tokens[last]]
    assert len(before) == 3
    assert last - max(before) > 256 / 5


def test_words_are_neither_keys_nor_marks() -> None:
    text = compose(64, [], np.random.default_rng(0))
    assert text.tokens[1:].min() >= FIRST_WORD


def test_events_that_do_not_fit_are_refused_with_the_length_they_need() -> None:
    rng = np.random.default_rng(0)
    facts = draw_facts(4, [0.0] * 4, rng)
    with pytest.raises(UserInputError, match="got length 15, want 16"):
        compose(15, [*facts, question(facts[0], 1.0)], rng)


def test_more_facts_than_keys_are_refused() -> None:
    with pytest.raises(UserInputError, match=f"want at most {NUM_KEYS}"):
        draw_facts(NUM_KEYS + 1, [0.0] * (NUM_KEYS + 1), np.random.default_rng(0))


def test_facts_of_one_text_have_different_keys() -> None:
    facts = draw_facts(NUM_KEYS, [0.0] * NUM_KEYS, np.random.default_rng(0))
    assert {fact.key for fact in facts} == set(range(FIRST_KEY, FIRST_KEY + NUM_KEYS))
