"""Train the recall model from nothing. Seeded, and a second start resumes it.

Looking up a fact is learned in short quizzes, with hints (`loss.py`), and then without them on
texts of every kind, which grow to 512 tokens. Matrices inside layers are trained with Muon (Jordan
et al., 2024), the rest with AdamW. A batch follows from the seed and its step alone, so a run that
was stopped ends with the same weights.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch

from scope_contracts.errors import UserInputError
from scope_lab.recall import model as recall
from scope_lab.recall.language import VOCAB_SIZE
from scope_lab.recall.lessons import draw_lesson, draw_quiz
from scope_lab.recall.loss import Batch, losses
from scope_lab.tiny.muon import Muon
from scope_runners.arguments import seed
from scope_runners.command_parser import CommandParser


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """`num_steps` batches of `batch` texts of `length` tokens."""

    length: int
    batch: int
    num_steps: int
    is_quiz: bool = False
    """Quizzes, with hints, instead of lessons, without."""


CURRICULUM = (
    Stage(length=64, batch=24, num_steps=150, is_quiz=True),
    Stage(length=64, batch=24, num_steps=50),
    Stage(length=128, batch=12, num_steps=80),
    Stage(length=256, batch=6, num_steps=80),
    Stage(length=512, batch=4, num_steps=140),
)
HINT_WEIGHT = 0.5
WARMUP_STEPS, DECAY_SHARE = 50, 0.4
MATRIX_LR, REST_LR = 1e-2, 5e-3
HELD_OUT_SEED = 1_000_000
_UNREADABLE = (OSError, EOFError, RuntimeError, LookupError, TypeError, UnpicklingError, ValueError)


class Trainer:
    """Owns the model, both optimisers and the step number."""

    def __init__(self, *, folder: Path, seed: int, curriculum: Sequence[Stage]) -> None:
        self.folder, self.seed, self.curriculum, self.step = folder, seed, tuple(curriculum), 0
        self.num_steps = sum(stage.num_steps for stage in self.curriculum)
        self.model = recall.new_recall_model(VOCAB_SIZE, seed=seed)
        matrices = [p for p in self.model.model.layers.parameters() if p.ndim == 2]
        chosen = {id(p) for p in matrices}
        rest = [p for p in self.model.parameters() if id(p) not in chosen]
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (
            Muon(matrices, lr=MATRIX_LR, momentum=0.95, weight_decay=0.01),
            torch.optim.AdamW(rest, lr=REST_LR, betas=(0.9, 0.98), weight_decay=0.0),
        )
        self._load()

    def stage_at(self, step: int) -> Stage:
        for stage in self.curriculum:
            if step < stage.num_steps:
                return stage
            step -= stage.num_steps
        raise AssertionError("asked for a step after the last")

    def train_step(self) -> tuple[float, float]:
        """One step of both optimisers; the loss of the answers, and the share of right ones."""
        stage = self.stage_at(self.step)
        rng = np.random.default_rng([self.seed, self.step])
        draw = draw_quiz if stage.is_quiz else draw_lesson
        batch = Batch.of([draw(stage.length, rng) for _ in range(stage.batch)])
        self.model.set_attn_implementation("eager" if stage.is_quiz else "sdpa")
        found = losses(self.model, batch, hinted=stage.is_quiz)
        (found.answers + HINT_WEIGHT * found.hints).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        left = (self.num_steps - self.step) / (DECAY_SHARE * self.num_steps)
        scale = min(1.0, (self.step + 1) / WARMUP_STEPS, left)
        for optimizer, lr in zip(self.optimizers, (MATRIX_LR, REST_LR), strict=True):
            optimizer.param_groups[0]["lr"] = lr * scale
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return found.answers.item(), found.right

    def run(self, report_every: int = 50) -> None:
        """Train to the end of the curriculum, telling and saving every `report_every` steps."""
        started, seen = time.monotonic(), []
        while self.step < self.num_steps:
            seen.append(self.train_step())
            if self.step % report_every == 0 or self.step == self.num_steps:
                loss, right = np.mean(seen, axis=0)
                length = self.stage_at(self.step - 1).length
                print(
                    f"step {self.step}/{self.num_steps} length {length} loss {loss:.3f} "
                    f"right {right:.1%} {time.monotonic() - started:.0f} s",
                    flush=True,
                )
                seen = []
                self.save()

    @property
    def _run(self) -> str:
        """What a saved state must agree with to be resumed."""
        return f"seed {self.seed}, {self.curriculum}"

    def save(self) -> None:
        state = {
            "run": self._run,
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        torch.save(state, self.folder / "state.tmp")
        (self.folder / "state.tmp").replace(self.folder / "state.pt")

    def _load(self) -> None:
        path = self.folder / "state.pt"
        if not path.exists():
            return
        try:
            state = torch.load(path)
            if state["run"] != self._run:
                raise UserInputError(
                    f"{path} is of a run with another seed or curriculum ({state['run']}); choose "
                    "another --out, or the seed it was started with"
                )
            self.step = state["step"]
            self.model.load_state_dict(state["model"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
        except _UNREADABLE as error:
            raise UserInputError(
                f"{path} is damaged, or no state of this trainer; delete it to start again"
            ) from error
        print(f"resumed at step {self.step}", flush=True)


@torch.inference_mode()
def held_out_accuracy(model: Any, length: int, *, num_texts: int = 64) -> float:
    """Share of right answers over texts that no training seed draws."""
    rng = np.random.default_rng([HELD_OUT_SEED, length])
    texts = [draw_lesson(length, rng) for _ in range(num_texts)]
    return losses(model, Batch.of(texts), hinted=False).right


def main(argv: Sequence[str]) -> int:
    """Train to the end and keep the model. Raises `UserInputError`."""
    parser = CommandParser(prog="scripts/lab train_recall", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("out/recall"), help="folder of the run (%(default)s)"
    )
    parser.add_argument("--seed", type=seed, default=0, help="of every random choice (%(default)s)")
    parser.add_argument(
        "--install", action="store_true", help="make the result the embedded recall model"
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (%(default)s)")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    trainer = Trainer(folder=args.out, seed=args.seed, curriculum=CURRICULUM)
    trainer.run()
    for length in dict.fromkeys(stage.length for stage in CURRICULUM):
        print(f"held out, length {length}: {held_out_accuracy(trainer.model, length):.1%}")
    folder = recall.FOLDER if args.install else args.out / "model"
    recall.save_recall_model(trainer.model, folder)
    print(f"model: {folder}")
    return 0
