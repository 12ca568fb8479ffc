"""Cached generation equals block-causal attention over the whole sequence, with no cache at all."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from scope_rt.attention.reference import DenseReference
from scope_rt.models.noise import SeededNoise
from scope_rt.models.rope import rotations
from tests.rounding import FP64_CONTRACT
from tests.tiny_models import BLOCK, CONFIG, GRID, STEPS, Rollout

pytestmark = pytest.mark.numeric

NUM_CHUNKS = 6


@dataclass
class FullAttention:
    """Every query sees the keys its chunk may see, by one dense mask over all frames so far."""

    num_frames: int
    sink: int
    window: int

    def __call__(self, layer: int, q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor) -> Tensor:
        tokens = GRID[0] * GRID[1]
        frame = torch.arange(self.num_frames).repeat_interleave(tokens)
        end = (frame // BLOCK + 1) * BLOCK
        visible = (frame[None] < end[:, None]) & (
            (frame[None] < self.sink) | (frame[None] >= end[:, None] - self.window)
        )
        out = torch.empty_like(q_BTHD)
        for row in range(len(frame)):
            seen, query = visible[row], q_BTHD[:, row : row + 1]
            out[:, row : row + 1] = DenseReference().attend(
                query, k_BTHD[:, seen], v_BTHD[:, seen], None
            )
        return out


def full_rollout(rollout: Rollout) -> list[Tensor]:
    """Each step runs the whole sequence: finished chunks at t=0, the open one at t."""
    model, schedule = rollout.model, rollout.generator.schedule
    text = model.text_kv(rollout.text[:, None])
    done: list[Tensor] = []
    for chunk in range(NUM_CHUNKS):
        frames = (chunk + 1) * BLOCK
        rope = rotations(
            range(frames), grid=GRID, head_dim=CONFIG.attention_head_dim, dtype=torch.complex128
        )
        attend = FullAttention(frames, rollout.sink, rollout.window)
        x = rollout.noise(chunk)
        for index, t in enumerate(STEPS):
            times = torch.tensor([[0.0] * (frames - BLOCK) + [t] * BLOCK], dtype=torch.float64)
            flow = model(
                torch.cat([*done, x], 1),
                modulation=model.modulation(times),
                rope=rope,
                text=text,
                attend=attend,
            )[:, -BLOCK:]
            x0 = x - schedule.sigma(t) * flow
            if index + 1 < len(STEPS):
                sigma = schedule.sigma(STEPS[index + 1])
                eps = SeededNoise().draw(
                    base_seed=3,
                    cache_epoch=0,
                    chunk_index=chunk,
                    step=index + 1,
                    shape=tuple(x.shape),
                )
                x = (1 - sigma) * x0 + sigma * eps.double()
        done.append(x0)
    return done


@pytest.mark.parametrize(
    ("sink", "window"), [(0, 18), (0, 6), (0, 7), (2, 4), (3, 6), (1, 9), (4, 5)]
)
def test_cached_generation_equals_block_causal_full_attention(sink: int, window: int) -> None:
    rollout = Rollout(sink, window)
    cached = rollout.run(range(NUM_CHUNKS))
    for mine, full in zip(cached, full_rollout(rollout), strict=True):
        assert (mine - full).abs().max() <= FP64_CONTRACT


def test_a_wrong_window_is_seen() -> None:
    rollout = Rollout(0, 6)
    cached = rollout.run(range(NUM_CHUNKS))
    rollout.window = 9
    assert (cached[-1] - full_rollout(rollout)[-1]).abs().max() > 1e-3
