"""On a GPU an edited context equals a full recompute, and gists are the CPU's."""

from dataclasses import replace

import torch

from scope_contracts.cache_spec import GIST_LEVELS
from scope_contracts.row_format import RowFormat
from scope_contracts.tensor_spec import DType
from scope_rt.kv_cache.factory import open_frame_cache
from scope_rt.lm.hierarchical.cache import HierarchicalCache
from scope_rt.lm.hierarchical.context import Collapse, Replace
from scope_rt.lm.hierarchical.editing import EditableContext
from scope_rt.lm.hierarchical.hierarchy import Hierarchy
from scope_rt.lm.models.multilevel import MultilevelConfig, MultilevelModel
from tests.gpu.conftest import NEEDS_GPU
from tests.kv_cache.test_gists import BLOCK, SPEC
from tests.rounding import gamma

CONFIG = MultilevelConfig(vocab_size=64, dim=128, num_layers=2, num_heads=2, ffn_dim=128)


def editable(model: MultilevelModel, device: torch.device) -> EditableContext:
    row_format = RowFormat.full(
        heads=CONFIG.num_heads, head_dim=CONFIG.head_dim, dtype=DType.FLOAT32
    )
    cache = HierarchicalCache(
        row_format,
        Hierarchy(group=32, windows=(128, 32, None)),
        num_layers=CONFIG.num_layers,
        max_leaves=2048,
        device=device,
    )
    return EditableContext(model, cache, chunk_leaves=128, bit_equal=True)


def test_an_edited_context_on_a_gpu_has_the_bits_of_a_full_recompute(
    device: torch.device,
) -> None:
    torch.manual_seed(0)
    model = MultilevelModel(CONFIG).to(device).eval()
    edited, fresh = editable(model, device), editable(model, device)
    edited.append(torch.randint(CONFIG.vocab_size, (2048,)).tolist())
    edited.edit([Collapse(1600), Replace(1700, (1, 2, 3))])
    fresh.load(edited.context)
    assert edited.cache.digest() == fresh.cache.digest()
    assert torch.equal(edited.last_leaf, fresh.last_leaf)


@NEEDS_GPU
def test_a_chunk_is_timed_on_a_gpu_that_is_idle_before_and_after() -> None:
    torch.manual_seed(0)
    gpu = torch.device("cuda")
    made = editable(MultilevelModel(CONFIG).to(gpu).eval(), gpu)
    made.append(torch.randint(CONFIG.vocab_size, (2048,)).tolist())
    idle = []

    def clock() -> float:
        idle.append(torch.cuda.current_stream().query())
        return 0.0

    for start in range(0, 2048, made.chunk_leaves):
        made.time_chunk(start, clock)
    assert idle == [True] * len(idle)


def test_a_stream_on_a_gpu_remembers_what_it_does_on_the_cpu(device: torch.device) -> None:
    spec = replace(SPEC, dtype=DType.FLOAT32)
    shape = (1, 3 * spec.frame_tokens, spec.num_heads, spec.head_dim)
    shown, largest = [], 0.0
    for place in (device, torch.device("cpu")):
        cache = open_frame_cache(spec, device=place)
        for chunk in range(40):
            window = cache.window(start_frame=3 * chunk, num_frames=3)
            k = torch.randn(shape, generator=torch.Generator().manual_seed(chunk)).to(place)
            largest = max(largest, float(k.abs().max()))
            for layer in range(spec.num_layers):
                k_all, _ = cache.update(layer, window, k, k)
            shown.append(k_all.cpu().clone())
            cache.advance(window)
    # A gist of the coarsest level adds and divides on each device.
    rounding = 2 * gamma(2 * BLOCK**GIST_LEVELS, torch.float32)
    for there, here in zip(shown[:40], shown[40:], strict=True):
        assert (there - here).abs().max() <= rounding * largest
