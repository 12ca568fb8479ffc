"""`scripts/bench_stream`: is it real time here? All parts are measured in turn, round after round,
so that a machine that slows down slows all of them; the median over the rounds counts.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scope_contracts.envelope import PlanId
from scope_lab.stream_process import plan_speed
from scope_rt.config import RuntimeConfig
from scope_rt.control.context import ContextMemory, anchor_encoder
from scope_rt.control.controller import Controller, Stages
from scope_rt.control.inbox import Conditioning, Directive
from scope_rt.control.planner import Planner, StreamSettings
from scope_rt.control.recompute import RecomputeAnchor
from scope_rt.control.recording import NullRecorder
from scope_rt.instruments import Instruments
from scope_rt.mesh.rank import Rank, RankSetup
from scope_rt.mesh.topology import RUNNABLE, Topology
from scope_rt.models.loading import EMBEDDED, ModelFolder
from scope_rt.models.noise import SeededNoise
from scope_rt.session import StreamSession
from scope_rt.video.writer import VideoWriter
from scope_runners.arguments import positive
from scope_runners.command_parser import CommandParser
from scope_runners.guarded import guarded
from scope_runners.job import available_cores

PROMPT = "a red circle and a blue square, medium, on navy"
END_TO_END, GENERATION, DECODE, ENCODE = (
    "single, end to end",
    "generation only",
    "decode only",
    "encode only",
)
OVERHEAD_GOAL = 0.02
Frames = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Frames per second over the rounds; `ratio` is the median over the stream's own rate."""

    median: float
    lowest: float
    highest: float
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """What one run found. `overhead_share` is the part of a chunk's time that is neither model,
    decode nor encode.
    """

    cores: int
    threads: int
    height: int
    width: int
    fps: int
    rounds: int
    chunks: int
    frames_per_s: dict[str, Figure]
    overhead_share: float


@dataclass(slots=True)
class _KeepLatents:
    """Stands where the decoder does and only remembers what it was given."""

    latents: list[Tensor] = field(default_factory=list)

    def decode(self, latents_BFCHW: Tensor) -> Tensor:
        self.latents.append(latents_BFCHW)
        return torch.empty(1, 0, 0, 0, 3, dtype=torch.uint8)

    def reset(self) -> None:
        self.latents.clear()

    def state(self) -> dict[str, Tensor]:
        return {}

    def restore(self, state: Mapping[str, Tensor]) -> None: ...


class Bench:
    """The parts of a stream, each measurable alone, over the same number of chunks."""

    def __init__(self, *, num_chunks: int, folder: Path) -> None:
        self._num_chunks, self._video = num_chunks, folder / "bench.mp4"
        self._model = ModelFolder.open(EMBEDDED)
        self.recipe = self._model.recipe
        self._session = StreamSession(self._model.path)
        self._codec = self._model.codec()
        self._decoder = self._codec.streaming_decoder()
        self._kept = _KeepLatents()
        self._controller, self._text = self._generation()
        self._frames: list[Frames] = []
        self.overheads: list[float] = []

    def end_to_end(self) -> float:
        """Frames/s of `single` with the encoder running; also notes the overhead share."""
        accounted_ms, num_frames, start_s = 0.0, 0, time.perf_counter()
        writer = self._writer()
        stream_s = time.perf_counter()
        for chunk in self._session.stream(PROMPT, num_chunks=self._num_chunks):
            writer.write(chunk.frames)
            accounted_ms += chunk.stage_ms["generate"] + chunk.stage_ms["decode"]
            num_frames += len(chunk.frames)
        streaming_s = time.perf_counter() - stream_s
        self.overheads.append(1 - (accounted_ms / 1e3 + writer.blocked_s) / streaming_s)
        writer.close()
        return num_frames / (time.perf_counter() - start_s)

    def generation(self) -> float:
        self._controller.inbox.post(Directive(conditioning=self._text, hard_cut=True))
        self._controller.begin()
        start_s = time.perf_counter()
        for _ in self._controller.run(self._num_chunks):
            pass
        elapsed_s = time.perf_counter() - start_s
        frames_per_chunk = self._codec.temporal_stride * self.recipe.frames_per_block
        return self._num_chunks * frames_per_chunk / elapsed_s

    def decode(self) -> float:
        self._decoder.reset()
        start_s = time.perf_counter()
        decoded = [self._decoder.decode(latents) for latents in self._kept.latents]
        elapsed_s = time.perf_counter() - start_s
        self._frames = [frames[0].numpy() for frames in decoded]
        return sum(map(len, self._frames)) / elapsed_s

    def encode(self) -> float:
        start_s = time.perf_counter()
        with self._writer() as writer:
            for frames in self._frames:
                writer.write(frames)
        return writer.num_frames / (time.perf_counter() - start_s)

    def plan(self, plan: str, tp: int) -> float:
        """Frames/s end to end of a multi-process plan, from its first frame on."""
        frames_per_chunk = self._codec.temporal_stride * self.recipe.frames_per_block
        seconds = self._num_chunks * frames_per_chunk / self.recipe.fps
        arguments = ["--prompt", PROMPT, "--seconds", f"{seconds:.6f}", "--out", str(self._video)]
        return plan_speed(plan, tp, arguments)

    def _writer(self) -> VideoWriter:
        recipe = self.recipe
        return VideoWriter(
            self._video, width=recipe.default_width, height=recipe.default_height, fps=recipe.fps
        )

    def _generation(self) -> tuple[Controller, Conditioning]:
        """A controller whose chunks are never decoded."""
        text, recipe = self._model.text_encoder(), self.recipe
        geometry = self._model.geometry(dtype=torch.float32)
        setup = RankSetup(
            model=self._model,
            topology=Topology(plan_id=PlanId.SINGLE, tp_degree=1),
            config=RuntimeConfig(),
            dtype=torch.float32,
            height=recipe.default_height,
            width=recipe.default_width,
        )
        settings = StreamSettings(
            plan_id=PlanId.SINGLE,
            recipe=recipe,
            height=recipe.default_height,
            width=recipe.default_width,
            base_seed=0,
        )
        rank = Rank(setup, geometry, instruments=Instruments())
        rank.start()
        stages = Stages(
            mesh=rank.port(),
            decoder=self._kept,
            memory=ContextMemory(
                recipe,
                anchor=RecomputeAnchor.LATENT,
                encode_anchor=anchor_encoder(self._codec),
                first_latent_frames=self._codec.first_latent_frames,
                temporal_stride=self._codec.temporal_stride,
            ),
            noise=SeededNoise(),
            geometry=geometry,
            cache=setup.cache_spec(geometry),
        )
        controller = Controller(
            Planner(settings=settings), stages, max_in_flight=1, recorder=NullRecorder()
        )
        return controller, Conditioning(PROMPT, text([PROMPT]))


def measure(
    *, rounds: int, num_chunks: int, threads: int, plans: Sequence[tuple[str, int]]
) -> Benchmark:
    """Run every measurement `rounds` times in turn, after one short round that is not counted."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(num_chunks=num_chunks, folder=Path(folder))
        parts: dict[str, Callable[[], float]] = {
            END_TO_END: bench.end_to_end,
            GENERATION: bench.generation,
            DECODE: bench.decode,
            ENCODE: bench.encode,
        }
        for name in parts:
            parts[name]()
        for plan, tp in plans:
            parts[f"{plan} --tp {tp}, end to end"] = partial(bench.plan, plan, tp)
        bench.overheads.clear()
        samples: dict[str, list[float]] = {name: [] for name in parts}
        for _ in range(rounds):
            for name, part in parts.items():
                samples[name].append(part())
    recipe = bench.recipe
    return Benchmark(
        cores=available_cores(),
        threads=threads,
        height=recipe.default_height,
        width=recipe.default_width,
        fps=recipe.fps,
        rounds=rounds,
        chunks=num_chunks,
        frames_per_s={name: _figure(values, recipe.fps) for name, values in samples.items()},
        overhead_share=statistics.median(bench.overheads),
    )


def table(result: Benchmark) -> str:
    """The benchmark for a person at a terminal."""
    lines = [
        f"{result.width}x{result.height} at {result.fps} frames/s; {result.cores} cores, "
        f"{result.threads} threads a process; median of {result.rounds} rounds of "
        f"{result.chunks} chunks",
        f"{'':<30} {'frames/s':>9} {'lowest':>9} {'highest':>9} {'x own rate':>11}",
    ]
    lines += [
        f"{name:<30} {figure.median:>9.1f} {figure.lowest:>9.1f} {figure.highest:>9.1f} "
        f"{figure.ratio:>10.2f}x"
        for name, figure in result.frames_per_s.items()
    ]
    lines.append(
        f"neither model, decode nor encode: {result.overhead_share:.2%} of a chunk "
        f"(goal: below {OVERHEAD_GOAL:.0%})"
    )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    return guarded(lambda: _run(argv), speaker="bench_stream")


def _run(argv: Sequence[str] | None) -> int:
    parser = CommandParser(prog="bench_stream", description="Frames per second on this machine.")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--chunks", type=positive, default=16, help="chunks of every measurement")
    parser.add_argument("--threads", type=positive, default=1, help="CPU threads of every rank")
    parser.add_argument("--plans", nargs="+", choices=RUNNABLE[1:], default=[], help="measure too")
    parser.add_argument("--tp", type=positive, default=2, help="TP degree of --plans")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    result = measure(
        rounds=options.rounds,
        num_chunks=options.chunks,
        threads=options.threads,
        plans=[(plan, options.tp) for plan in options.plans],
    )
    print(json.dumps(asdict(result), indent=2) if options.json else table(result))
    return 0


def _figure(values: Sequence[float], fps: int) -> Figure:
    median = statistics.median(values)
    return Figure(median=median, lowest=min(values), highest=max(values), ratio=median / fps)


if __name__ == "__main__":
    raise SystemExit(main())
