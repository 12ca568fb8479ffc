from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from scope_contracts.errors import UserInputError
from scope_lab.recall.language import (
    FIRST_VALUE,
    FIRST_WORD,
    NUM_VALUES,
    VOCAB_SIZE,
    Event,
    compose,
    question,
)
from scope_lab.recall.lessons import draw_lesson, draw_quiz
from scope_lab.recall.loss import Batch, keys_of_values, losses
from scope_lab.recall.model import FOLDER, load_recall_model, new_recall_model, save_recall_model
from scope_lab.recall.train import Stage, Trainer
from tests.rounding import is_rounded_to_half

CURRICULUM = (
    Stage(length=24, batch=2, num_steps=2, is_quiz=True),
    Stage(length=32, batch=2, num_steps=2),
)


def trained(folder: Path, *, seed: int = 0) -> Trainer:
    trainer = Trainer(folder=folder, seed=seed, curriculum=CURRICULUM)
    trainer.run(report_every=1)
    return trainer


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return list(trainer.model.state_dict().values())


def test_training_that_was_stopped_ends_with_the_same_weights(tmp_path: Path) -> None:
    stopped = Trainer(folder=tmp_path / "stopped", seed=0, curriculum=CURRICULUM)
    for _ in range(3):
        stopped.train_step()
    stopped.save()
    went_on, straight = trained(tmp_path / "stopped"), trained(tmp_path / "straight")
    assert went_on.step == straight.step == 4
    assert all(map(torch.equal, weights(went_on), weights(straight)))


def test_another_seed_trains_another_model(tmp_path: Path) -> None:
    first, second = trained(tmp_path / "0"), trained(tmp_path / "1", seed=1)
    assert not all(map(torch.equal, weights(first), weights(second)))


def test_the_state_of_another_run_is_not_resumed(tmp_path: Path) -> None:
    trained(tmp_path)
    for seed, curriculum in ((5, CURRICULUM), (0, CURRICULUM[:1])):
        with pytest.raises(UserInputError, match="another seed or curriculum"):
            Trainer(folder=tmp_path, seed=seed, curriculum=curriculum)


@pytest.mark.parametrize("content", [b"", b"x", b"PK\x03\x04 cut"])
def test_a_damaged_state_is_one_sentence(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "state.pt").write_bytes(content)
    with pytest.raises(UserInputError, match="is damaged, or no state of this trainer; delete it"):
        Trainer(folder=tmp_path, seed=0, curriculum=CURRICULUM)


def test_texts_get_longer_as_the_curriculum_says(tmp_path: Path) -> None:
    trainer = Trainer(folder=tmp_path, seed=0, curriculum=CURRICULUM)
    assert [trainer.stage_at(step).length for step in range(4)] == [24, 24, 32, 32]


def test_what_is_saved_is_half_precision_and_loads_as_it_was_trained(tmp_path: Path) -> None:
    trainer = Trainer(folder=tmp_path, seed=0, curriculum=CURRICULUM)
    save_recall_model(trainer.model, tmp_path / "model")
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {"config.json", "model.safetensors"}
    loaded = load_recall_model(tmp_path / "model")
    for name, weight in trainer.model.state_dict().items():
        assert is_rounded_to_half(loaded.state_dict()[name], weight)
    assert loaded.dtype == trainer.model.dtype == torch.float32


def test_the_first_step_has_no_answer_by_heart(tmp_path: Path) -> None:
    loss, right = Trainer(folder=tmp_path, seed=0, curriculum=CURRICULUM).train_step()
    assert loss == pytest.approx(5.3, abs=1.0)
    assert right < 0.5


def test_hints_do_not_change_what_the_answers_cost() -> None:
    model = new_recall_model(VOCAB_SIZE, seed=0)
    model.set_attn_implementation("eager")
    rng = np.random.default_rng(0)
    batch = Batch.of([draw_lesson(48, rng) for _ in range(4)])
    hinted, plain = losses(model, batch, hinted=True), losses(model, batch, hinted=False)
    assert torch.equal(hinted.answers, plain.answers)
    assert plain.hints.item() == 0.0
    assert hinted.hints.item() > 5.0  # an untrained model knows neither key nor place


def test_a_value_is_known_by_the_key_before_it_wherever_it_stands() -> None:
    fact = Event(depth=0.5, key=5, value=FIRST_VALUE + 1)
    text = compose(16, [fact, question(fact, 1.0)], np.random.default_rng(0))
    (keys,) = keys_of_values(torch.from_numpy(text.tokens[None])).tolist()
    is_value = (text.tokens >= FIRST_VALUE) & (text.tokens < FIRST_VALUE + NUM_VALUES)
    assert FIRST_WORD == FIRST_VALUE + NUM_VALUES
    assert [key for key, here in zip(keys, is_value, strict=True) if here] == [5, 5]
    assert {key for key, here in zip(keys, is_value, strict=True) if not here} == {-1}


def test_a_quiz_asks_every_fact_once_so_no_answer_can_be_copied() -> None:
    text = draw_quiz(64, np.random.default_rng(1))
    asked = [int(text.tokens[at]) for at in text.questions]
    assert len(asked) == len(set(asked)) >= 2


def test_transformers_reads_the_embedded_recall_model_by_itself() -> None:
    theirs = LlamaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    ours = load_recall_model()
    assert all(map(torch.equal, theirs.state_dict().values(), ours.state_dict().values()))
