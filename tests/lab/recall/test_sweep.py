from typing import Any

import numpy as np
import pytest
import torch

from scope_contracts.errors import UserInputError
from scope_lab.recall.language import Text
from scope_lab.recall.lessons import draw_lesson
from scope_lab.recall.model import FOLDER, load_recall_model
from scope_lab.recall.sweep import measure_cell, right_answers
from scope_lab.recall.systems import (
    EVICTING,
    FULL,
    H2O_INT8,
    PAGED,
    SLIDING,
    SYSTEMS,
    bytes_per_token,
    opened,
)
from scope_lab.recall.tasks import Task, draw_task
from scope_lab.recall.train import held_out_accuracy

ROWS = 32


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    return load_recall_model()


def accuracy(model: Any, system: str, task: Task, *, length: int = 128) -> float:
    return measure_cell(
        model, system=system, task=task, length=length, capacity=ROWS, num_texts=8
    ).accuracy


def answers(model: Any, system: str, texts: list[Text], *, capacity: int = ROWS) -> list[float]:
    (length,) = {len(text.tokens) for text in texts}
    with opened(model, system, capacity=capacity, batch=len(texts), length=length) as cache:
        return right_answers(model, texts, cache=cache)


def test_the_embedded_recall_model_is_small_and_an_ordinary_llama(model: Any) -> None:
    assert type(model).__name__ == "LlamaForCausalLM"
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 2 * 2**20


@pytest.mark.parametrize("length", [64, 128, 256, 512])
def test_with_a_full_cache_the_recall_model_finds_over_95_percent(model: Any, length: int) -> None:
    assert held_out_accuracy(model, length, num_texts=24) > 0.95


@pytest.mark.parametrize("task", Task)
def test_with_a_full_cache_every_needle_task_is_solved(model: Any, task: Task) -> None:
    assert accuracy(model, FULL, task) > 0.95


def test_reading_in_pieces_answers_as_reading_at_once_does(model: Any) -> None:
    rng = np.random.default_rng(5)
    texts = [draw_lesson(96, rng) for _ in range(8)]
    at_once = right_answers(model, texts, piece_tokens=96)
    assert right_answers(model, texts, piece_tokens=8) == at_once


@pytest.mark.parametrize("system", EVICTING)
def test_rows_enough_for_the_whole_text_cost_no_answer(model: Any, system: str) -> None:
    rng = np.random.default_rng(6)
    texts = [draw_task(Task.MULTI_QUERY, 64, 0.2, rng) for _ in range(8)]
    assert answers(model, system, texts, capacity=64) == answers(model, FULL, texts)


@pytest.mark.parametrize("system", [PAGED, "int8"])
def test_paged_and_int8_answer_as_the_full_cache_does(model: Any, system: str) -> None:
    rng = np.random.default_rng(8)
    texts = [draw_lesson(96, rng) for _ in range(8)]
    assert answers(model, system, texts) == answers(model, FULL, texts)


def test_a_sliding_window_finds_nothing_that_has_left_it(model: Any) -> None:
    cell = measure_cell(
        model,
        system=SLIDING,
        task=Task.SINGLE,
        length=128,
        capacity=ROWS,
        num_texts=8,
        depths=(0.25, 0.9),
    )
    (_, lost), (_, found) = cell.right
    assert lost <= 0.25
    assert found > 0.95


@pytest.mark.parametrize("task", [Task.SINGLE, Task.MULTI_QUERY, Task.ASKED_BEFORE])
def test_h2o_beats_a_sliding_window_of_as_many_rows(model: Any, task: Task) -> None:
    assert accuracy(model, "h2o", task) > accuracy(model, SLIDING, task) + 0.2


def test_what_h2o_keeps_answers_from_int8_as_it_does_from_float32(model: Any) -> None:
    for task in (Task.SINGLE, Task.ASKED_BEFORE):
        assert abs(accuracy(model, H2O_INT8, task) - accuracy(model, "h2o", task)) < 0.05
    assert 2.5 * bytes_per_token(model, H2O_INT8) < bytes_per_token(model, FULL)


def test_h2o_forgets_young_facts_that_a_sliding_window_of_as_many_rows_still_holds(
    model: Any,
) -> None:
    """Mass adds up with age, so what was told late loses to what was told early."""

    def late(system: str) -> float:
        return measure_cell(
            model,
            system=system,
            task=Task.MULTI_KEY,
            length=128,
            capacity=ROWS,
            num_texts=16,
            depths=(0.75,),
        ).accuracy

    assert late("h2o") < late(SLIDING) - 0.2


def test_the_reported_bytes_of_an_evicting_cache_are_those_of_its_tensors(model: Any) -> None:
    tokens = torch.zeros((2, 48), dtype=torch.int64)
    with opened(model, "h2o", capacity=ROWS, batch=2, length=48), torch.inference_mode():
        layers = model(tokens, use_cache=True).past_key_values.layers
    held = [t for x in layers for t in (x.keys, x.values, x.rows.columns, x.rows.mass)]
    held += [x.rows.is_real for x in layers]
    assert sum(t.nbytes for t in held) == 2 * ROWS * bytes_per_token(model, "h2o")


def test_a_sweep_that_fails_leaves_the_model_as_it_was(model: Any) -> None:
    texts = [draw_task(Task.SINGLE, 64, 0.2, np.random.default_rng(7))]
    size = {"capacity": ROWS, "batch": 1, "length": 64}
    with pytest.raises(RuntimeError, match="told to stop"), opened(model, "h2o", **size):
        raise RuntimeError("told to stop")
    # Eviction that were still installed would refuse to be installed again.
    assert len(answers(model, "h2o", texts)) == 1


def test_an_unknown_system_is_refused_by_name(model: Any) -> None:
    with (
        pytest.raises(UserInputError, match=f"got 'lru', want one of {', '.join(SYSTEMS[:2])}"),
        opened(model, "lru", capacity=ROWS, batch=1, length=64),
    ):
        pass


@pytest.mark.parametrize("capacity", [None, 0, 2])
def test_rows_that_leave_no_room_beside_the_sinks_are_refused(
    model: Any, capacity: int | None
) -> None:
    with (
        pytest.raises(UserInputError, match="want more than the 2 sinks"),
        opened(model, "h2o", capacity=capacity, batch=1, length=64),
    ):
        pass
