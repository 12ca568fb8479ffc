"""A recorded rollout of a reference implementation, run again by this runtime, number for number.

A recording is `NAME.safetensors` (weights in the original Wan naming, noise, text, result) beside
`NAME.json` (sizes, and the cache indices after every generator call); tests/parity/README.md
describes both.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from scope_contracts.cache_spec import CacheIndices, KVCacheSpec
from scope_contracts.envelope import (
    CONDITIONING_EMBEDS,
    LATENTS_IN,
    MessageKind,
    PlanId,
    PPEnvelope,
)
from scope_contracts.errors import UserInputError
from scope_contracts.tensor_spec import DType
from scope_rt.attention.backend import backend_named
from scope_rt.collectives import Collectives, SoloCollectives
from scope_rt.kv_cache.ring import RingCache
from scope_rt.mesh.budget import CallBudget
from scope_rt.models.config import CausalWanConfig
from scope_rt.models.generator import ChunkGenerator
from scope_rt.models.loading import build_transformer
from scope_rt.models.original_names import to_diffusers
from scope_rt.models.schedule import FlowSchedule
from scope_runners.main import guarded
from scope_runners.request import CommandParser

CPU = torch.device("cpu")
TOLERANCE = 2e-5
"""What fp32 reordering may move; a wrong window moves the result by 0.15."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCall:
    """One generator call: timestep fed, first token written, and the indices it led to."""

    timestep: float
    current_start_token: int
    global_end_index: int
    local_end_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityReport:
    """How far the rollout is from the recording, and the index trace it took."""

    max_abs_diff: float
    tolerance: float
    trace_matches: bool
    calls: tuple[TracedCall, ...]

    @property
    def passed(self) -> bool:
        return self.trace_matches and self.max_abs_diff <= self.tolerance


@dataclass(frozen=True, slots=True)
class RecordedNoise:
    """The recording's re-noise, `[chunks * (steps - 1), F, C, H, W]`, chunk-major."""

    renoise: Tensor
    num_steps: int

    def draw(
        self,
        *,
        base_seed: int,
        cache_epoch: int,
        chunk_index: int,
        step: int,
        shape: tuple[int, ...],
    ) -> Tensor:
        return self.renoise[chunk_index * (self.num_steps - 1) + step - 1].expand(shape)


class Recording:
    """The files of one recording, read and checked."""

    def __init__(self, path: Path) -> None:
        try:
            self.tensors = load_file(path)
            raw = json.loads(path.with_suffix(".json").read_text())
            self.sizes: dict[str, Any] = raw["config"]
            self.calls: list[dict[str, Any]] = raw["calls"]
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise UserInputError(
                f"cannot read the recording {path}: {error!r}; give NAME.safetensors with "
                f"NAME.json beside it"
            ) from error
        needed = ("noise", "renoise", "text_embeds", "denoising_step_list", "latents")
        missing = [name for name in needed if name not in self.tensors]
        if missing:
            raise UserInputError(f"{path} lacks {', '.join(missing)}; is it a rollout recording?")
        if "kv_cache_num_frames" in self.sizes:
            raise UserInputError(
                f"{path} recomputes its cache; this version runs clean-pass recordings only"
            )

    @property
    def timesteps(self) -> tuple[float, ...]:
        return tuple(self.tensors["denoising_step_list"].tolist())

    def config(self) -> CausalWanConfig:
        sizes = self.sizes
        return CausalWanConfig(
            num_attention_heads=sizes["heads"],
            attention_head_dim=sizes["dim"] // sizes["heads"],
            in_channels=sizes["in_dim"],
            out_channels=sizes["in_dim"],
            text_dim=sizes["text_dim"],
            freq_dim=sizes["freq_dim"],
            ffn_dim=sizes["ffn_dim"],
            num_layers=sizes["layers"],
        )

    def cache_spec(self) -> KVCacheSpec:
        """The ring that keeps what the reference keeps: its window counts the sinks in."""
        batch, frames, _, height, width = self.tensors["noise"].shape
        config, sink = self.config(), self.sizes.get("sink", 0)
        attended = frames if self.sizes["local_attn"] == -1 else self.sizes["local_attn"]
        return KVCacheSpec(
            num_layers=config.num_layers,
            num_heads=config.num_attention_heads,
            head_dim=config.attention_head_dim,
            frame_tokens=height * width // 4,
            sink_frames=sink,
            window_frames=attended - sink,
            batch=batch,
            dtype=DType.FLOAT32,
        )

    def envelope(self, chunk: int) -> PPEnvelope:
        steps, first = self.timesteps, chunk == 0
        return PPEnvelope(
            plan_id=PlanId.SINGLE,
            call_id=chunk,
            chunk_index=chunk,
            cache_epoch=0,
            kind=MessageKind.INFER,
            init_cache=first,
            reset_kv_cache=first,
            reset_crossattn_cache=first,
            current_start_frame=chunk * self.sizes["frames_per_block"],
            do_kv_recompute=False,
            clean_pass=True,
            num_denoise_steps=len(steps),
            expected_generator_calls=len(steps) + 1,
            kv_cache_attention_bias=1.0,
            denoising_step_list=steps,
            height=self.tensors["noise"].shape[3] * 8,
            width=self.tensors["noise"].shape[4] * 8,
            base_seed=0,
        )


def replay(recording: Recording, group: Collectives | None = None) -> ParityReport:
    """Run the rollout of `recording` on this rank's slice of the model, and compare."""
    group = group or SoloCollectives()
    weights = {name: w for name, w in recording.tensors.items() if name.startswith("model.")}
    calls: list[TracedCall] = []

    def observe(timestep: float, start_token: int, indices: CacheIndices) -> None:
        calls.append(
            TracedCall(
                timestep=timestep,
                current_start_token=start_token,
                global_end_index=indices.global_end_index,
                local_end_index=indices.local_end_index,
            )
        )

    generator = ChunkGenerator(
        model=build_transformer(
            recording.config(), to_diffusers(weights), group, dtype=torch.float32, device=CPU
        ),
        ring=RingCache(
            recording.cache_spec(), tp_degree=group.size, dtype=torch.float32, device=CPU
        ),
        schedule=FlowSchedule(shift=recording.sizes["shift"]),
        backend=backend_named("sdpa"),
        noise=RecordedNoise(recording.tensors["renoise"], len(recording.timesteps)),
        observe=observe,
    )
    chunks: list[Tensor] = []
    for index, noise in enumerate(
        recording.tensors["noise"].split(recording.sizes["frames_per_block"], dim=1)
    ):
        envelope, tensors = recording.envelope(index), {LATENTS_IN: noise}
        if envelope.reset_crossattn_cache:
            tensors[CONDITIONING_EMBEDS] = recording.tensors["text_embeds"]
        budget = CallBudget(index, envelope.expected_generator_calls)
        chunks.append(generator.generate(envelope, tensors, budget.enter))
    difference = (torch.cat(chunks, dim=1) - recording.tensors["latents"]).abs().max().item()
    return ParityReport(
        max_abs_diff=difference,
        tolerance=TOLERANCE,
        trace_matches=_same_trace(calls, recording.calls),
        calls=tuple(calls),
    )


def _same_trace(seen: list[TracedCall], recorded: list[dict[str, Any]]) -> bool:
    want = [
        TracedCall(
            timestep=seen_call.timestep
            if abs(seen_call.timestep - call["timestep"]) < 1e-2
            else call["timestep"],
            current_start_token=call["current_start_token"],
            global_end_index=call["global_end_index"],
            local_end_index=call["local_end_index"],
        )
        for seen_call, call in zip(seen, recorded, strict=False)
    ]
    return len(seen) == len(recorded) and seen == want


def main(argv: Sequence[str] | None = None) -> int:
    """Run one recording; exit 0 if it agrees, 1 if not, 2 if it cannot be read."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    return guarded(lambda: _run(arguments))


def _run(argv: Sequence[str]) -> int:
    parser = CommandParser(prog="scripts/parity", description=__doc__)
    parser.add_argument("recording", type=Path, metavar="FILE.safetensors")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    report = replay(Recording(args.recording))
    if args.json:
        print(json.dumps(asdict(report) | {"passed": report.passed}))
    else:
        print(f"{'timestep':>9}{'start':>8}{'global':>8}{'local':>8}")
        for call in report.calls:
            print(
                f"{call.timestep:9.1f}{call.current_start_token:8d}"
                f"{call.global_end_index:8d}{call.local_end_index:8d}"
            )
        trace = "as recorded" if report.trace_matches else "DIFFERS from the recording"
        print(f"index trace {trace}")
        print(f"max abs diff {report.max_abs_diff:.3g}, bar {report.tolerance:.0e}")
    return 0 if report.passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
