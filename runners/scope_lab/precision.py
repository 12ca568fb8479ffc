"""How far a model computed in bfloat16 is from the same weights in float64, beside float32.

Random weights, rounded to bfloat16 once and for all: what differs is what was computed. Errors are
root mean squares, relative to what they are errors of; `rounded once` is what it takes to store the
exact result in bfloat16.
"""

import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from scope_contracts.cache_spec import KVCacheSpec
from scope_contracts.envelope import CONDITIONING_EMBEDS, LATENTS_IN
from scope_rt.attention.backend import backend_named
from scope_rt.kv_cache.factory import open_frame_cache
from scope_rt.models.causal_wan import CausalWanModel
from scope_rt.models.config import CausalWanConfig
from scope_rt.models.generator import ChunkGenerator
from scope_rt.models.lone_chunk import lone_envelope
from scope_rt.models.noise import SeededNoise
from scope_rt.models.schedule import FlowSchedule
from scope_rt.tensor_digests import NoDigests
from scope_rt.tensors import NAMES
from scope_runners.command_parser import CommandParser

STEPS = (1000.0, 937.5, 833.3, 625.0)
SIDE, TEXT_LEN = 8, 16
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def main(argv: Sequence[str]) -> int:
    """Print the table, or one JSON object."""
    parser = CommandParser(prog="scripts/lab precision", description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8, help="of 128 channels each")
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(argv)
    report = errors(
        layers=asked.layers, heads=asked.heads, num_chunks=asked.chunks, seed=asked.seed
    )
    if asked.json:
        print(json.dumps(report))
        return 0
    print(f"{asked.layers} layers of {128 * asked.heads} channels, random weights")
    for dtype, by_what in report.items():
        print(f"{dtype:<9}", "  ".join(f"{what} {error:.2e}" for what, error in by_what.items()))
    return 0


def errors(*, layers: int, heads: int, num_chunks: int, seed: int) -> dict[str, dict[str, float]]:
    """By dtype: of modulation, of the first call's flow, and of each chunk's latents."""
    config = CausalWanConfig(
        num_attention_heads=heads,
        attention_head_dim=128,
        in_channels=16,
        out_channels=16,
        text_dim=64,
        freq_dim=256,
        ffn_dim=512 * heads,
        num_layers=layers,
    )
    weights = _random_weights(config, seed)
    exact = _made(config, weights, torch.float64, num_chunks=num_chunks, seed=seed)
    report = {"rounded once": {what: _error(x.bfloat16(), x) for what, x in exact.items()}}
    for dtype in DTYPES:
        got = _made(config, weights, dtype, num_chunks=num_chunks, seed=seed)
        report[NAMES[dtype].value] = {what: _error(got[what], x) for what, x in exact.items()}
    return report


def _error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).square().mean().sqrt() / want.square().mean().sqrt())


def _random_weights(config: CausalWanConfig, seed: int) -> dict[str, Tensor]:
    """As a trained model's: products keep the size of what they are made of."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in CausalWanModel(config).named_parameters()}
    weights = {}
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=generator)
        if name.endswith(("norm_q.weight", "norm_k.weight", "norm2.weight")):
            weight = 1 + 0.2 * drawn
        elif len(shape) == 1 or name.endswith("scale_shift_table"):
            weight = 0.1 * drawn
        else:
            weight = drawn / drawn[0].numel() ** 0.5
        weights[name] = weight.bfloat16()
    return weights


def _made(
    config: CausalWanConfig,
    weights: Mapping[str, Tensor],
    dtype: torch.dtype,
    *,
    num_chunks: int,
    seed: int,
) -> dict[str, Tensor]:
    model = CausalWanModel(config).to(dtype).requires_grad_(False).eval()
    model.load_state_dict({name: weight.to(dtype) for name, weight in weights.items()})
    spec = KVCacheSpec(
        num_layers=config.num_layers,
        num_heads=config.num_attention_heads,
        head_dim=128,
        frame_tokens=(SIDE // 2) ** 2,
        sink_frames=0,
        window_frames=6,
        batch=1,
        dtype=NAMES[dtype],
        block_frames=3,
    )
    flows = list[Tensor]()
    model.register_forward_hook(lambda module, arguments, flow: flows.append(flow))
    generator = ChunkGenerator(
        model=model,
        cache=open_frame_cache(spec, device=torch.device("cpu")),
        schedule=FlowSchedule(),
        backend=backend_named("sdpa"),
        noise=SeededNoise(),
        derived=NoDigests(),
    )
    drawn = torch.Generator().manual_seed(seed)
    text = torch.randn(1, TEXT_LEN, config.text_dim, generator=drawn).bfloat16()
    made = dict[str, Tensor]()
    for chunk in range(num_chunks):
        noise = torch.randn(1, 3, 16, SIDE, SIDE, generator=drawn).bfloat16()
        tensors = {LATENTS_IN: noise.to(dtype), CONDITIONING_EMBEDS: text.to(dtype)}
        envelope = lone_envelope(
            chunk, STEPS, frames_per_block=3, height=8 * SIDE, width=8 * SIDE, seed=3
        )
        made[f"chunk {chunk}"] = generator.generate(envelope, tensors, lambda: None)
    first = generator.modulations[STEPS[0]]
    return {"modulation": first.layers, "flow": flows[0], **made}
