"""A chunk of a rollout by the whole sequence, with no cache at all; not a test itself."""

import torch
from torch import Tensor

from scope_rt.models.causal_wan import SelfAttention
from scope_rt.models.noise import SeededNoise
from scope_rt.models.rope import rotations
from tests.tiny_models import BLOCK, CONFIG, GRID, STEPS, Rollout


def uncached_chunk(
    rollout: Rollout, past_BTCHW: Tensor, chunk: int, attend: SelfAttention
) -> Tensor:
    """The chunk after `past_BTCHW`, each step over both: the past at t=0, the open chunk at t.

    Positions count from 0 at the first frame of the past.
    """
    model, sigma = rollout.model, rollout.generator.schedule.sigma
    num_past = past_BTCHW.shape[1]
    rope = rotations(
        range(num_past + BLOCK),
        grid=GRID,
        head_dim=CONFIG.attention_head_dim,
        dtype=torch.complex128,
    )
    text = model.text_kv(rollout.text[:, None])
    x = rollout.noise(chunk)
    for index, t in enumerate(STEPS):
        times = torch.tensor([[0.0] * num_past + [t] * BLOCK], dtype=torch.float64)
        flow: Tensor = model(
            torch.cat([past_BTCHW, x], 1),
            modulation=model.modulation(times),
            rope=rope,
            text=text,
            attend=attend,
        )[:, -BLOCK:]
        x0 = x - sigma(t) * flow
        if index + 1 < len(STEPS):
            noise = sigma(STEPS[index + 1])
            eps = SeededNoise().draw(
                base_seed=3, cache_epoch=0, chunk_index=chunk, step=index + 1, shape=tuple(x.shape)
            )
            x = (1 - noise) * x0 + noise * eps.double()
    return x0
