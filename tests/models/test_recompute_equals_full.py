"""A cache rebuilt from context equals block-causal attention over that context, with no cache."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from scope_contracts.call_budget import CallBudget
from scope_contracts.envelope import CONDITIONING_EMBEDS, CONTEXT_FRAMES_OVERRIDE, LATENTS_IN
from scope_rt.attention.reference import DenseReference
from tests.models.uncached import uncached_chunk
from tests.rounding import FP64_CONTRACT
from tests.tiny_models import BLOCK, GRID, Rollout, envelope

pytestmark = pytest.mark.numeric

TOKENS = GRID[0] * GRID[1]


def attend_by_blocks(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every query sees its own block of frames and those before it."""
    frames = torch.arange(q.shape[1] // TOKENS).repeat_interleave(TOKENS)
    ends = (frames // BLOCK + 1) * BLOCK * TOKENS
    rows = [
        DenseReference().attend(q[:, i : i + 1], k[:, :end], v[:, :end], None)
        for i, end in enumerate(ends.tolist())
    ]
    return torch.cat(rows, dim=1)


def full_chunk(rollout: Rollout, context: Tensor, chunk: int) -> Tensor:
    """The chunk after `context`, of which no frame sees a later block."""
    num_tokens = context.shape[1] * TOKENS

    def attend(layer: int, q_BTHD: Tensor, k_BTHD: Tensor, v_BTHD: Tensor) -> Tensor:
        q, k, v = (rows[:, :num_tokens] for rows in (q_BTHD, k_BTHD, v_BTHD))
        past = attend_by_blocks(layer, q, k, v)
        now = DenseReference().attend(q_BTHD[:, num_tokens:], k_BTHD, v_BTHD, None)
        return torch.cat([past, now], dim=1)

    return uncached_chunk(rollout, context, chunk, attend)


def rebuilt_chunk(rollout: Rollout, context: Tensor, chunk: int) -> Tensor:
    plan = envelope(chunk)
    plan = replace(
        plan,
        do_kv_recompute=True,
        reset_crossattn_cache=True,
        expected_generator_calls=plan.expected_generator_calls + 1,
    )
    tensors = {
        LATENTS_IN: rollout.noise(chunk),
        CONDITIONING_EMBEDS: rollout.text,
        CONTEXT_FRAMES_OVERRIDE: context,
    }
    budget = CallBudget(chunk, plan.expected_generator_calls)
    out = rollout.generator.generate(plan, tensors, budget.enter)
    assert budget.observed == plan.expected_generator_calls
    return out


@pytest.mark.parametrize("num_context", [1, 3, 5, 6])
def test_a_rebuilt_cache_equals_block_causal_full_attention(num_context: int) -> None:
    rollout = Rollout(0, 9)
    history = torch.cat(rollout.run(range(3)), dim=1)
    context = history[:, -num_context:]
    want = full_chunk(rollout, context, 3)
    assert (rebuilt_chunk(rollout, context, 3) - want).abs().max() <= FP64_CONTRACT


def test_another_context_is_seen() -> None:
    rollout = Rollout(0, 9)
    history = torch.cat(rollout.run(range(3)), dim=1)
    want = full_chunk(rollout, history[:, -6:], 3)
    assert (rebuilt_chunk(rollout, history[:, -3:], 3) - want).abs().max() > 1e-3


def test_chunks_after_a_rebuild_go_on_where_it_left_the_ring() -> None:
    """With nothing evicted, positions from 0 on and absolute ones differ by rounding only."""
    rollout = Rollout(0, 12)
    chunks = rollout.run(range(4))
    again = Rollout(0, 12)
    again.run(range(2))
    rebuilt_chunk(again, torch.cat(chunks[:2], dim=1), 2)
    assert (again.chunk(3) - chunks[3]).abs().max() <= FP64_CONTRACT
