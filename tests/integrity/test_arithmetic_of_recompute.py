"""A call that rebuilds the cache is audited as the others are."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from scope_contracts.call_budget import CallBudget
from scope_contracts.envelope import CONDITIONING_EMBEDS, CONTEXT_FRAMES_OVERRIDE, LATENTS_IN
from scope_contracts.errors import IntegrityError
from scope_contracts.integrity import IntegrityLevel
from scope_rt.integrity.arithmetic import ArithmeticCheck
from scope_rt.integrity.audit_plan import CallPlanner
from scope_rt.models.chunk_attention import BlockCausalSelfAttention
from tests.integrity.audited import EVERY, GENERATOR, NUM_TURNS
from tests.tiny_models import BLOCK, STEPS, Rollout, envelope

LEVELS = pytest.mark.parametrize("level", [IntegrityLevel.DEFAULT, IntegrityLevel.STRICT])
NUM_CONTEXT = 5
"""Latent frames: a whole block, and a part of one."""


def run(level: IntegrityLevel, num_chunks: int, *, every: int = EVERY, first: int = 0) -> None:
    """Chunks that each begin with a recompute, from `first` on, and have no clean pass."""
    rollout = Rollout(sink=0, window=9, dtype=torch.float32)
    check = ArithmeticCheck(rollout.generator, level=level, rank=0, every=every)
    planner = CallPlanner()
    for chunk in range(num_chunks):
        plan = replace(
            envelope(chunk, bias=0.6, calls=len(STEPS) + (chunk >= first)),
            do_kv_recompute=chunk >= first,
            clean_pass=False,
            current_start_frame=7 * (chunk >= first) + chunk * BLOCK,
        )
        context = torch.cat([rollout.noise(90), rollout.noise(91)], 1)[:, :NUM_CONTEXT]
        tensors = {LATENTS_IN: rollout.noise(chunk)}
        if chunk >= first:
            tensors[CONTEXT_FRAMES_OVERRIDE] = context
        if chunk == 0:
            tensors[CONDITIONING_EMBEDS] = rollout.text
        check.begin(plan, tensors, planner.calls(plan, tensors))
        rollout.generator.generate(
            plan, tensors, CallBudget(chunk, plan.expected_generator_calls).enter
        )
        check.end()


@pytest.mark.numeric
@LEVELS
def test_a_clean_recompute_passes(level: IntegrityLevel) -> None:
    run(level, NUM_TURNS if level is IntegrityLevel.DEFAULT else 2)


@LEVELS
def test_context_that_sees_later_blocks_is_found(
    level: IntegrityLevel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_wide(*, block_tokens: int, **named: Any) -> BlockCausalSelfAttention:
        return BlockCausalSelfAttention(block_tokens=2 * block_tokens, **named)

    monkeypatch.setattr(GENERATOR + "BlockCausalSelfAttention", too_wide)
    with pytest.raises(IntegrityError, match=r"rank 0, call 0, .*self-attention"):
        run(level, NUM_TURNS)


def test_a_recompute_is_audited_in_the_chunk_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_wide(*, block_tokens: int, **named: Any) -> BlockCausalSelfAttention:
        return BlockCausalSelfAttention(block_tokens=2 * block_tokens, **named)

    monkeypatch.setattr(GENERATOR + "BlockCausalSelfAttention", too_wide)
    with pytest.raises(IntegrityError, match=r"chunk 3, rank 0, call 0, .*self-attention"):
        run(IntegrityLevel.DEFAULT, 4, every=8, first=3)
