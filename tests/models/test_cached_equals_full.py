"""Cached generation equals block-causal attention over the whole sequence, with no cache at all."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from scope_rt.attention.reference import DenseReference
from tests.models.uncached import uncached_chunk
from tests.rounding import FP64_CONTRACT
from tests.tiny_models import BLOCK, GRID, Rollout

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
    """Each step of every chunk runs all frames so far."""
    done: list[Tensor] = []
    for chunk in range(NUM_CHUNKS):
        attend = FullAttention((chunk + 1) * BLOCK, rollout.sink, rollout.window)
        past = torch.cat([rollout.noise(0)[:, :0], *done], dim=1)
        done.append(uncached_chunk(rollout, past, chunk, attend))
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
