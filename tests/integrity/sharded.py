"""A rank of a group over the shards of one random model; not a test itself."""

import torch

from scope_rt.collectives import Collectives
from scope_rt.kv_cache.factory import open_frame_cache
from scope_rt.models.causal_wan import CausalWanModel
from scope_rt.models.shards import shards_of
from tests.tiny_models import CONFIG, CPU, Rollout, cache_spec


def sharded(group: Collectives, dtype: torch.dtype) -> Rollout:
    """Make all ranks' before their threads start: they draw from one generator."""
    rollout = Rollout(sink=1, window=8, dtype=dtype)
    model = CausalWanModel(CONFIG, group).to(dtype).requires_grad_(False)
    weights = dict(rollout.model.named_parameters())
    with torch.no_grad():
        for name, part in shards_of(weights, group).items():
            linear = model.get_parameter(name)
            linear.data = part.clone()
    spec = cache_spec(sink=1, window=8, dtype=rollout.generator.cache.spec.dtype)
    rollout.model = rollout.generator.model = model
    rollout.generator.cache = open_frame_cache(spec, device=CPU, group=group)
    return rollout
