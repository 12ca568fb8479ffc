"""`scripts/bench_stream`: is it real time here? All parts are measured in turn, round after round,
so that a machine that slows down slows all of them; the median over the rounds counts.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scope_contracts.integrity import IntegrityLevel
from scope_lab.stream_process import plan_speed
from scope_rt.config import StreamConfig
from scope_rt.control.inbox import Directive
from scope_rt.control.loop import StreamLoop
from scope_rt.control.planner import Planner
from scope_rt.control.stages import Stages
from scope_rt.instruments import Instruments
from scope_rt.mesh.rank import Rank
from scope_rt.models.noise import SeededNoise
from scope_rt.record.log import Log, NullLog
from scope_rt.session import StreamSession
from scope_rt.stream_setup import StreamSetup
from scope_rt.topology import RUNNABLE
from scope_rt.video.writer import VideoWriter
from scope_runners.arguments import positive
from scope_runners.command_parser import CommandParser
from scope_runners.job import available_cores

PROMPT = "a red circle and a blue square, medium, on navy"
END_TO_END, BARE, GENERATION, DECODE, ENCODE = (
    "single, end to end",
    "single, nothing kept or verified",
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
    decode nor encode; `bare_overhead_share` of a stream without log, snapshot and integrity.
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
    bare_overhead_share: float


@dataclass(slots=True)
class _KeepLatents:
    """In the place of a decoder: only remembers what it was given."""

    latents: list[Tensor] = field(default_factory=list)

    def decode(self, latents_BFCHW: Tensor) -> Tensor:
        self.latents.append(latents_BFCHW)
        return torch.empty(1, 0, 0, 0, 3, dtype=torch.uint8)

    def reset(self) -> None:
        self.latents.clear()


class Bench:
    """The parts of a stream, each measurable alone, over the same number of chunks."""

    def __init__(self, *, num_chunks: int, folder: Path) -> None:
        self._num_chunks, self._video = num_chunks, folder / "bench.mp4"
        config = StreamConfig.load().with_settings(
            log=folder / "bench.log", snapshot=folder / "bench.snapshot", resume=False
        )
        bare = config.with_settings(log=None, snapshot=None, integrity=IntegrityLevel.OFF)
        self._setup = StreamSetup.of(config)
        self.recipe = self._setup.recipe
        self._sessions = {END_TO_END: StreamSession(self._setup), BARE: StreamSession(bare)}
        self._codec = self._setup.codec
        self._decoder = self._codec.streaming_decoder()
        self._kept = _KeepLatents()
        self._loop = self._generation()
        self._frames: list[Frames] = []
        self.overheads: dict[str, list[float]] = {END_TO_END: [], BARE: []}

    def end_to_end(self, name: str = END_TO_END) -> float:
        """Frames/s of `single` with the encoder running, a log and a snapshot, as `scope-rt stream`
        has them, or `BARE`; also notes the overhead share."""
        session = self._sessions[name]
        accounted_ms, num_frames, start_s = 0.0, 0, time.perf_counter()
        writer = self._writer(session.log)
        stream_s = time.perf_counter()
        chunks = session.stream(
            PROMPT, num_chunks=self._num_chunks, acknowledged=lambda: writer.durable_chunks
        )
        for chunk in chunks:
            writer.write(chunk.frames, chunk_index=chunk.chunk_index)
            accounted_ms += chunk.stage_ms["generate"] + chunk.stage_ms["decode"]
            num_frames += len(chunk.frames)
        streaming_s = time.perf_counter() - stream_s
        self.overheads[name].append(1 - (accounted_ms / 1e3 + writer.blocked_s) / streaming_s)
        writer.close()
        return num_frames / (time.perf_counter() - start_s)

    def generation(self) -> float:
        text = self._setup.conditioning(PROMPT)
        self._loop.inbox.post(Directive(conditioning=text, hard_cut=True))
        self._loop.begin()
        start_s = time.perf_counter()
        for _ in self._loop.run(self._num_chunks):
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

    def _writer(self, ledger: Log | None = None) -> VideoWriter:
        recipe = self.recipe
        return VideoWriter(
            self._video,
            width=recipe.default_width,
            height=recipe.default_height,
            fps=recipe.fps,
            ledger=ledger,
        )

    def _generation(self) -> StreamLoop:
        """A loop whose chunks are never decoded."""
        setup, instruments = self._setup, Instruments()
        rank = Rank(setup, instruments=instruments)
        rank.start()
        stages = Stages(
            mesh=rank.port(),
            context=setup.context_memory(),
            noise=SeededNoise(),
            geometry=setup.geometry,
            cache=setup.cache_spec,
        )
        return StreamLoop(
            Planner(settings=setup.settings),
            stages,
            self._kept,
            max_in_flight=setup.topology.max_in_flight,
            num_tail_frames=setup.num_tail_frames,
            log=NullLog(),
            record_latents=False,
            instruments=instruments,
        )


def measure(
    *, rounds: int, num_chunks: int, threads: int, plans: Sequence[tuple[str, int]]
) -> Benchmark:
    """Run every measurement `rounds` times in turn, after one short round that is not counted."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(num_chunks=num_chunks, folder=Path(folder))
        parts: dict[str, Callable[[], float]] = {
            END_TO_END: bench.end_to_end,
            BARE: partial(bench.end_to_end, BARE),
            GENERATION: bench.generation,
            DECODE: bench.decode,
            ENCODE: bench.encode,
        }
        for name in parts:
            parts[name]()
        for plan, tp in plans:
            parts[f"{plan} --tp {tp}, end to end"] = partial(bench.plan, plan, tp)
        for overheads in bench.overheads.values():
            overheads.clear()
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
        overhead_share=statistics.median(bench.overheads[END_TO_END]),
        bare_overhead_share=statistics.median(bench.overheads[BARE]),
    )


def table(result: Benchmark) -> str:
    """The benchmark for a person at a terminal."""
    lines = [
        f"{result.width}x{result.height} at {result.fps} frames/s; {result.cores} cores, "
        f"{result.threads} threads a process; median of {result.rounds} rounds of "
        f"{result.chunks} chunks",
        f"{'':<33} {'frames/s':>9} {'lowest':>9} {'highest':>9} {'x own rate':>11}",
    ]
    lines += [
        f"{name:<33} {figure.median:>9.1f} {figure.lowest:>9.1f} {figure.highest:>9.1f} "
        f"{figure.ratio:>10.2f}x"
        for name, figure in result.frames_per_s.items()
    ]
    lines.append(
        f"neither model, decode nor encode: {result.overhead_share:.2%} of a chunk "
        f"(goal: below {OVERHEAD_GOAL:.0%}); without log, snapshot and integrity: "
        f"{result.bare_overhead_share:.2%}"
    )
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Measure and print; returns the exit code."""
    parser = CommandParser(
        prog="scripts/lab bench_stream", description="Frames per second on this machine."
    )
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
