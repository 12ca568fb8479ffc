import pytest
import torch
from transformers.cache_utils import DynamicCache

from scope_rt.lm.eviction import install_kv_eviction
from tests.lm.eviction_models import KINDS, prompt, tiny_lm


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_gpu_evicts_what_a_cpu_evicts(kind: str, device: torch.device) -> None:
    tokens, kept = prompt(40), {}
    for place in (torch.device("cpu"), device):
        model, cache = tiny_lm(kind).to(place), DynamicCache()
        install_kv_eviction(model, budget=6, n_sink=2, n_recent=4)
        for ids in tokens.to(place).split([20, *[1] * 20], dim=-1):
            model(ids, past_key_values=cache)
        kept[place.type] = [layer.positions.tolist() for layer in cache.layers]
        assert cache.layers[0].keys.device.type == place.type
    assert kept[device.type] == kept["cpu"]
