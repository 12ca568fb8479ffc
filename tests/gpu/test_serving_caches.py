"""On a GPU a cache holds the same rows, and flash-attn decodes out of its memory in place."""

from importlib import import_module

import pytest
import torch
from torch import Tensor

from scope_contracts.row_format import RowFormat
from scope_contracts.tensor_spec import DType
from scope_rt.attention.reference import DenseReference
from scope_rt.lm.cache.backend_policy import DeviceTraits, Lane, choose_lane, why_not
from scope_rt.lm.cache.contiguous import ContiguousCache
from scope_rt.lm.cache.layer_map import AttnLayerMap
from scope_rt.lm.models.mla import MLA, MLAConfig, MLAForm
from tests.gpu.conftest import NEEDS_GPU
from tests.rounding import FP64_CONTRACT, attention_bound

ROWS = RowFormat.full(heads=4, head_dim=64, dtype=DType.BFLOAT16)
BATCH, MAX_TOKENS = 2, 32


def cache(device: torch.device, rows: RowFormat = ROWS) -> ContiguousCache:
    return ContiguousCache(
        rows,
        layers=AttnLayerMap.all_of(1),
        batch=BATCH,
        max_tokens=MAX_TOKENS,
        device=device,
    )


def tokens(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, count, 4, 64, generator=generator).bfloat16()


def prefill(made: ContiguousCache, counts: list[int]) -> None:
    made.extend(counts)
    device = made.store.device
    made.append(0, tokens(max(counts), 1).to(device), tokens(max(counts), 2).to(device))
    made.advance()


def test_a_cache_on_the_gpu_has_the_digest_of_one_on_the_cpu(device: torch.device) -> None:
    digests = set()
    for place in (torch.device("cpu"), device):
        made = cache(place)
        prefill(made, [7, 12])
        made.keep(0, torch.tensor([[0, 3, 6], [1, 2, 11]], device=place))
        prefill(made, [2, 3])
        digests.add(made.digest())
        assert made.cache_seqlens(0).device.type == place.type
    assert len(digests) == 1


@NEEDS_GPU
@pytest.mark.parametrize("lane", [Lane.FLASH_2, Lane.FLASH_3])
def test_flash_attn_decodes_ragged_sequences_in_place_and_does_not_count(lane: Lane) -> None:
    reason = why_not(lane, DeviceTraits.of(torch.device("cuda")), ROWS)
    if reason is not None:
        pytest.skip(reason)
    assert lane.package is not None
    kernel = import_module(lane.package).flash_attn_with_kvcache
    made, counts = cache(torch.device("cuda")), [7, 12]
    prefill(made, counts)
    q, k, v = (tokens(1, seed).cuda() for seed in (3, 4, 5))
    made.extend([1, 1])
    keys, values = made.memory(0)
    out = kernel(q, keys, values, k=k, v=v, cache_seqlens=made.cache_seqlens(0), causal=True)
    assert made.cache_seqlens(0).tolist() == counts
    made.wrote_in_place(0)
    made.advance()
    shown_keys, shown_values = made.view(0)
    for sequence, count in enumerate(counts):
        one = slice(sequence, sequence + 1)
        q1, (k1, v1) = q[one], (x[one, : count + 1] for x in (shown_keys, shown_values))
        want = DenseReference().attend(q1.double(), k1.double(), v1.double(), None)
        assert ((out[one] - want).abs() / attention_bound(q1, k1, v1)).max() <= 1


@NEEDS_GPU
def test_the_lane_of_this_device_is_found() -> None:
    traits = DeviceTraits.of(torch.device("cuda"))
    choice = choose_lane(traits, ROWS)
    assert traits.capability == torch.cuda.get_device_capability()
    assert len(choice.passed_over) == [Lane.FLASH_3, Lane.FLASH_2, Lane.DENSE].index(choice.lane)


@pytest.mark.parametrize(
    ("dtype", "bar"),
    [(torch.float64, FP64_CONTRACT), (torch.bfloat16, 5e-2)],
    ids=["float64", "bfloat16"],
)
def test_absorbed_decode_equals_expand_then_attend_on_the_gpu(
    dtype: torch.dtype, bar: float, device: torch.device
) -> None:
    config = MLAConfig(
        hidden_size=256,
        num_attention_heads=4,
        q_lora_rank=128,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )
    torch.manual_seed(0)
    layer = MLA(config).to(device, dtype).requires_grad_(False)
    x = torch.randn(BATCH, 9, 256, device=device, dtype=dtype)
    outputs = []
    for form, spans in ((MLAForm.EXPANDED, [9]), (MLAForm.ABSORBED, [5, 1, 1, 1, 1])):
        rows = config.row_format(DType.FLOAT64 if dtype is torch.float64 else DType.BFLOAT16)
        made, parts = cache(device, rows), []
        for part in x.split(spans, dim=1):
            start, count = made.lengths[0], part.shape[1]
            where = torch.arange(start, start + count, device=device).expand(BATCH, -1)
            made.extend([count] * BATCH)
            parts.append(layer(part, positions_BT=where, cache=made, layer=0, form=form))
            made.advance()
        outputs.append(torch.cat(parts, 1))
    assert (outputs[0] - outputs[1]).abs().max() <= bar
