"""What eviction saves and costs on a transformers model, against the same model without it.

Throughputs are ratios of things that were timed in the same round, in processor time of one thread,
or of all that `--threads` asks for. The model is a small Llama with random weights: tokens mean
nothing, times and bytes do.
Prompts are fed in pieces; a peak is measured while attention runs, before rows leave.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from scope_contracts.row_format import CodecKind
from scope_contracts.tensor_spec import DType
from scope_lab.kv_bench.result import Curve, Effort, Line, Part, SystemResult
from scope_lab.kv_bench.stopwatch import Stopwatch, median_ratio
from scope_lab.recall.held import bytes_held, cache_bytes
from scope_lab.recall.model import new_recall_model
from scope_rt.kv_cache.policy import EvictionPolicy, HeavyHitters, sliding_window
from scope_rt.lm.eviction import install_eviction_policy, remove_kv_eviction
from scope_rt.lm.eviction_layer import EvictingLayer
from scope_rt.lm.specs.row_storage import Evicting

VOCAB = 512
PIECE_TOKENS = 64
SINKS, BUDGET, RECENT = 4, 60, 64
FULL, FULL_SDPA, RECOMPUTE = "full cache", "full cache, sdpa", "recompute"
H2O = HeavyHitters(budget=BUDGET, num_sink=SINKS, num_recent=RECENT)
EVICTING: Mapping[str, tuple[EvictionPolicy, CodecKind]] = {
    "h2o": (H2O, CodecKind.IDENTITY),
    "h2o, every 8th step": (replace(H2O, evict_every=8), CodecKind.IDENTITY),
    "h2o, int8": (H2O, CodecKind.INT8),
    "h2o, int4": (H2O, CodecKind.INT4),
    "sink + recent": (
        sliding_window(num_sink=SINKS, num_recent=BUDGET + RECENT),
        CodecKind.IDENTITY,
    ),
}
CAPACITY = SINKS + BUDGET + RECENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is decoded, and how often it is timed."""

    contexts: tuple[int, ...]
    """Tokens before the first timed step; the last is the table's."""
    steps: int
    rounds: int


SCALES: Mapping[Effort, Scale] = {
    Effort.QUICK: Scale(contexts=(256,), steps=4, rounds=1),
    Effort.FULL: Scale(contexts=(256, 512, 1024, 2048), steps=16, rounds=5),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """One system after one context."""

    step_s: float
    """Processor time of a decode step."""
    num_rows: int = 0
    """Most rows a layer held between two decode steps."""
    peak_bytes: int = 0
    """Most that all layers held and one copied while attention ran, the prompt included."""
    row_bytes: float = 0
    """Of one row in all layers, scores and positions included."""


def measure(effort: Effort) -> Part:
    """Bytes, peaks and throughput, and throughput over the length of the context."""
    scale = SCALES[effort]
    found = {context: _rounds(context, scale) for context in scale.contexts}
    table = scale.contexts[-1]
    rows = found[table]
    return Part(
        title=f"H2O: {CAPACITY} rows a layer of {table} tokens",
        systems=tuple(_row(name, rows) for name in rows[0] if name != RECOMPUTE),
        curves=(
            Curve(
                key="h2o_throughput",
                title=f"decoding with {CAPACITY} rows a layer",
                x_label="tokens of context",
                y_label="throughput over the full cache's (eager)",
                lines=tuple(
                    Line(
                        name=name,
                        points=tuple(
                            (context, _ratio(found[context], FULL, name)) for context in found
                        ),
                    )
                    for name in (*EVICTING, FULL_SDPA)
                ),
                log_x=True,
            ),
        ),
        notes=(
            "a Llama of 2 layers and 2 K/V heads of 32, float32, batch 1, all but one row with "
            "eager attention, the only one that returns probabilities",
            f"h2o: {SINKS} sinks, {BUDGET} heavy hitters, {RECENT} recent; prompts in pieces of "
            f"{PIECE_TOKENS} tokens; a row's position and score take "
            f"{Evicting.marks(DType.FLOAT32)} bytes a layer beside it",
        ),
    )


def measure_once(context: int, num_steps: int) -> dict[str, Decoding]:
    """Every system once, after the same tokens."""
    model = new_recall_model(VOCAB, seed=0).eval()
    generator = torch.Generator().manual_seed(context)
    ids = torch.randint(0, VOCAB, (1, context + num_steps), generator=generator)
    prompt, steps = ids[:, :context], ids[:, context:].split(1, dim=-1)
    found = {}
    for name, attention in ((FULL, "eager"), (FULL_SDPA, "sdpa")):
        model.set_attn_implementation(attention)
        found[name] = _decode(model, prompt, steps)
    model.set_attn_implementation("eager")
    for name, (policy, codec) in EVICTING.items():
        install_eviction_policy(model, policy, codec=codec)
        found[name] = _decode(model, prompt, steps)
        remove_kv_eviction(model)
    with torch.no_grad(), Stopwatch() as watch:
        model(ids, use_cache=False, logits_to_keep=1)
    found[RECOMPUTE] = Decoding(step_s=watch.seconds)
    return found


@torch.no_grad()
def _decode(model: Any, prompt: Tensor, steps: Sequence[Tensor]) -> Decoding:
    cache: Any = None
    num_rows = 0
    with bytes_held(model) as held:
        for piece in prompt.split(PIECE_TOKENS, dim=-1):
            cache = model(piece, past_key_values=cache, logits_to_keep=1).past_key_values
    with Stopwatch() as watch:
        for ids in steps:
            model(ids, past_key_values=cache)
            num_rows = max(num_rows, _num_rows(cache.layers[0]))
    held_now = cache_bytes(cache)  # a step copies no more than a piece did, but a cache may grow
    return Decoding(
        step_s=watch.seconds / len(steps),
        num_rows=num_rows,
        peak_bytes=max(*held, held_now),
        row_bytes=held_now / _num_rows(cache.layers[0]),
    )


def _num_rows(layer: Any) -> int:
    if isinstance(layer, EvictingLayer):
        return layer.num_rows
    num_rows: int = layer.keys.shape[2]
    return num_rows


def _rounds(context: int, scale: Scale) -> list[dict[str, Decoding]]:
    return [measure_once(context, scale.steps) for _ in range(scale.rounds)]


def _ratio(rounds: Sequence[Mapping[str, Decoding]], base: str, name: str) -> float:
    """Throughput of `name` over that of `base`."""
    return median_ratio([it[base].step_s for it in rounds], [it[name].step_s for it in rounds])


def _row(name: str, rounds: Sequence[Mapping[str, Decoding]]) -> SystemResult:
    found = rounds[0][name]
    return SystemResult(
        name=name,
        bytes_per_token=found.row_bytes,
        peak_bytes=found.peak_bytes,
        throughput_vs_recompute=_ratio(rounds, RECOMPUTE, name),
        throughput_vs_contiguous=_ratio(rounds, FULL, name),
        notes=(f"at most {found.num_rows} rows a layer between decode steps",),
    )
