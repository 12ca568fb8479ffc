"""What a row costs in each form it may be stored in: bytes, and time of a decode step.

Every form is timed in every round, in processor time of one thread, or of all that `--threads` asks
for.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scope_contracts.row_format import CodecKind, RowFormat
from scope_contracts.tensor_spec import DType
from scope_lab.cache_peak import peak_bytes
from scope_lab.kv_bench.result import Effort, Part, SystemResult
from scope_lab.kv_bench.states import SCALES, Scale
from scope_lab.kv_bench.stopwatch import median_ratio, step_seconds
from scope_lab.recall.model import load_recall_model
from scope_rt.lm.cache.backend_policy import DeviceTraits, Lane, why_not
from scope_rt.lm.cache.contiguous import ContiguousCache
from scope_rt.lm.cache.layer_map import AttnLayerMap
from scope_rt.lm.model_rows import model_rows
from scope_rt.lm.models.mla import MLA, MLAConfig, MLAForm
from scope_rt.lm.step import next_logits

CPU = torch.device("cpu")
LATENT = MLAConfig(
    hidden_size=512,
    num_attention_heads=24,
    q_lora_rank=256,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)
"""DeepSeek's row, and a specialist's 24 heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """A decoder whose context is cached: `step` decodes once more."""

    cache: ContiguousCache
    step: Callable[[], object]


def measure(effort: Effort) -> Part:
    """Codecs on the recall model, and latent rows on one attention layer of DeepSeek's kind."""
    scale = SCALES[effort]
    return Part(
        title="Storage: bytes and time of a row",
        systems=(*_codecs(scale), *_latent(scale), *_not_here()),
        notes=(
            f"batch 1, {scale.context} tokens cached, float32, no GPU; codecs on the recall model "
            "(2 layers, 2 K/V heads of 32), latent rows on one layer of 24 heads",
            "codecs decode all rows at every step here: they save memory, not time",
            "x contiguous of latent rows: against expanding them to all heads at every step; the "
            "keys and values of all heads that this makes count to the model, not to the cache",
        ),
    )


def _codecs(scale: Scale) -> list[SystemResult]:
    model = load_recall_model(attention="sdpa")
    names = {f"contiguous {kind}": kind for kind in CodecKind}
    makers = {name: lambda kind=kind: _decoder(model, kind, scale) for name, kind in names.items()}
    tokens = torch.zeros((1, scale.context), dtype=torch.int64)

    def recompute() -> object:
        return model(tokens, use_cache=False, logits_to_keep=1)

    return _compared(makers, recompute, baseline=next(iter(names)), scale=scale)


def _decoder(model: Any, codec: CodecKind, scale: Scale) -> Steps:
    rows = model_rows(model, codec=codec)
    cache = _cache(rows.row_format, rows.layers, scale)
    next_logits(model, rows, cache, [[0] * scale.context])
    return Steps(cache=cache, step=lambda: next_logits(model, rows, cache, [[1]]))


def _latent(scale: Scale) -> list[SystemResult]:
    torch.manual_seed(0)
    mla = MLA(LATENT).requires_grad_(False)
    makers = {
        f"latent, {form}": lambda form=form: _attender(mla, form, scale)
        for form in reversed(MLAForm)
    }
    hidden = torch.randn(1, scale.context, LATENT.hidden_size)

    def recompute() -> object:
        return _attend(mla, _latent_cache(scale), hidden, MLAForm.EXPANDED)

    return _compared(makers, recompute, baseline="latent, expanded", scale=scale)


def _attender(mla: MLA, form: MLAForm, scale: Scale) -> Steps:
    cache = _latent_cache(scale)
    _attend(mla, cache, torch.randn(1, scale.context, LATENT.hidden_size), MLAForm.EXPANDED)
    token = torch.randn(1, 1, LATENT.hidden_size)
    return Steps(cache=cache, step=lambda: _attend(mla, cache, token, form))


def _attend(mla: MLA, cache: ContiguousCache, x_BTC: Tensor, form: MLAForm) -> Tensor:
    start, num_new = cache.lengths[0], x_BTC.shape[1]
    cache.extend([num_new])
    positions = torch.arange(start, start + num_new)[None]
    out: Tensor = mla(x_BTC, positions_BT=positions, cache=cache, layer=0, form=form)
    cache.advance()
    return out


def _latent_cache(scale: Scale) -> ContiguousCache:
    return _cache(LATENT.row_format(DType.FLOAT32), AttnLayerMap.all_of(1), scale)


def _cache(row_format: RowFormat, layers: AttnLayerMap, scale: Scale) -> ContiguousCache:
    return ContiguousCache(
        row_format, layers=layers, batch=1, max_tokens=scale.max_tokens, device=CPU
    )


@torch.inference_mode()
def _compared(
    makers: Mapping[str, Callable[[], Steps]],
    recompute: Callable[[], object],
    *,
    baseline: str,
    scale: Scale,
) -> list[SystemResult]:
    """Every form against computing the past anew, and against the baseline."""
    decode_s: dict[str, list[float]] = {name: [] for name in makers}
    recompute_s: list[float] = []
    caches: dict[str, ContiguousCache] = {}
    for _ in range(scale.rounds):
        for name, make in makers.items():
            decoder = make()
            decode_s[name].append(step_seconds(decoder.step, scale.num_steps))
            caches[name] = decoder.cache
        recompute_s.append(step_seconds(recompute, 1))
    return [
        SystemResult(
            name=name,
            bytes_per_token=cache.format.bytes_per_row * cache.layers.num_slots,
            peak_bytes=peak_bytes(cache),
            throughput_vs_recompute=median_ratio(recompute_s, decode_s[name]),
            throughput_vs_contiguous=median_ratio(decode_s[baseline], decode_s[name]),
        )
        for name, cache in caches.items()
    ]


def _not_here() -> list[SystemResult]:
    """Kernels that would read these rows in place."""
    rows = RowFormat.full(heads=2, head_dim=32, dtype=DType.BFLOAT16)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    traits, unmeasured = DeviceTraits.of(device), "this command measures on the CPU only"
    lanes = {
        "paged, read in place by FlashAttention-3": Lane.FLASH_3,
        "paged, read in place by FlashAttention-2": Lane.FLASH_2,
    }
    results = [
        SystemResult(name=name, cannot_run=why_not(lane, traits, rows) or unmeasured)
        for name, lane in lanes.items()
    ]
    fp8 = unmeasured if device.type == "cuda" else "needs a CUDA device with float8 units"
    return [*results, SystemResult(name="fp8 read by a float8 attention kernel", cannot_run=fp8)]
