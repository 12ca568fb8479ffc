"""Streams that share a batch are looked at together, and each in its turn."""

from dataclasses import replace

import pytest
import torch

from scope_contracts.call_budget import CallBudget
from scope_contracts.envelope import CONDITIONING_EMBEDS, LATENTS_IN
from scope_contracts.integrity import IntegrityLevel
from scope_contracts.tensor_spec import DType
from scope_rt.integrity.arithmetic import ArithmeticCheck
from scope_rt.integrity.audit_plan import CallPlanner
from scope_rt.kv_cache.factory import open_frame_cache
from tests.integrity.audited import BIAS
from tests.tiny_models import CPU, STEPS, Rollout, cache_spec, envelope


@pytest.mark.numeric
@pytest.mark.parametrize("level", [IntegrityLevel.DEFAULT, IntegrityLevel.STRICT])
def test_a_clean_batch_of_two_passes(level: IntegrityLevel) -> None:
    rollout = Rollout(sink=1, window=8, dtype=torch.float32)
    spec = replace(cache_spec(sink=1, window=8, dtype=DType.FLOAT32), batch=2)
    rollout.generator.cache = open_frame_cache(spec, device=CPU)
    check = ArithmeticCheck(rollout.generator, level=level, rank=0)
    planner = CallPlanner()
    for chunk in range(6):
        plan = envelope(chunk, bias=BIAS)
        tensors = {LATENTS_IN: torch.cat([rollout.noise(chunk), rollout.noise(chunk + 50)])}
        if chunk == 0:
            tensors[CONDITIONING_EMBEDS] = torch.cat([rollout.text, rollout.text.flip(1)])
        check.begin(plan, tensors, planner.calls(plan, tensors))
        rollout.generator.generate(plan, tensors, CallBudget(chunk, len(STEPS) + 1).enter)
        check.end()
