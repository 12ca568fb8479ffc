"""What it costs to be able to resume: bytes and milliseconds a chunk, at 480x832 and Wan's sizes.

The resume point is that of a recompute model (Krea's recipe, with a decoded anchor) whose codec
needs 38 latent frames to decode one as it was: no other recipe keeps more latents.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from scope_contracts.envelope import LATENTS_OUT, PlanId, PPEnvelope
from scope_contracts.tensor_spec import DType
from scope_lab.sample_log import durable, finished, opened
from scope_rt.config import StreamConfig
from scope_rt.control.inbox import Conditioning, Directive, ScheduledDirective
from scope_rt.control.planner import Planner, StreamSettings
from scope_rt.control.resume_point import PendingChunk, ResumePoint
from scope_rt.control.saved_points import SavedResumePoints
from scope_rt.control.tail import StreamTail, TailChunk
from scope_rt.models.recipe import Recipe
from scope_rt.models.recipe_choices import CacheUpkeep
from scope_rt.record.snapshot import SnapshotStore
from scope_rt.record.stream_log import StreamLog
from scope_rt.stream_identity import identity
from scope_rt.stream_setup import StreamSetup
from scope_rt.tensors import TORCH_DTYPES, sha256_of, spec_of
from scope_runners.arguments import dtype
from scope_runners.command_parser import CommandParser

HEIGHT, WIDTH = 480, 832
LATENTS_SHAPE = (1, 3, 16, HEIGHT // 8, WIDTH // 8)
TEXT_SHAPE = (1, 512, 4096)
RECIPE = Recipe(
    denoising_steps=(1000.0, 750.0, 500.0, 250.0),
    shift=5.0,
    frames_per_block=LATENTS_SHAPE[1],
    window_frames=6,
    sink_frames=0,
    fps=16,
    default_height=HEIGHT,
    default_width=WIDTH,
    cache_upkeep=CacheUpkeep.RECOMPUTE,
    kv_cache_num_frames=3,
)
NUM_TAIL_FRAMES = 38 + RECIPE.context_frames
NUM_PENDING = 2
PROMPTS = ("a red circle", "a green square")
STAGE_MS = (("plan", 0.5), ("generate", 400.0), ("wait", 1.0), ("decode", 90.0))
MOST_BYTES, MOST_MS = 10e6, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one run; milliseconds of every save and of what is appended to the log for a chunk."""

    num_kept: int
    """Chunks whose latents the last resume point has."""
    save_ms: list[float]
    log_ms: list[float]
    folder_bytes: int
    written_bytes: int
    log_bytes: int


def main(argv: Sequence[str]) -> int:
    """Print the table; 1 if a save is over a bar."""
    parser = CommandParser(prog="scripts/lab bench_snapshot", description=__doc__)
    parser.add_argument("--chunks", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=40, help="of the prompt; the rest is padding")
    parser.add_argument("--events", type=int, default=0, help="still scheduled, not saved")
    parser.add_argument("--dtype", type=dtype, default=DType.BFLOAT16)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: a temporary)")
    asked = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        figures = measure(
            Path(folder),
            num_chunks=asked.chunks,
            num_tokens=asked.tokens,
            num_events=asked.events,
            dtype=TORCH_DTYPES[asked.dtype],
        )
    median_ms = statistics.median(figures.save_ms)
    print(
        f"{asked.chunks} chunks of {asked.dtype} latents {LATENTS_SHAPE}, {figures.num_kept} kept, "
        f"text {TEXT_SHAPE} with {asked.tokens} tokens, {asked.events} events"
    )
    print(
        f"snapshot   {figures.folder_bytes / 1e6:.2f} MB in all (bar {MOST_BYTES / 1e6:.0f}), "
        f"{figures.written_bytes / 1e6:.2f} MB written a save; {_spread(figures.save_ms)} "
        f"(bar {MOST_MS:.0f} for the median)"
    )
    print(f"stream log {figures.log_bytes} bytes a chunk; {_spread(figures.log_ms)}")
    return int(figures.folder_bytes > MOST_BYTES or median_ms > MOST_MS)


def measure(
    folder: Path, *, num_chunks: int, num_tokens: int, num_events: int, dtype: torch.dtype
) -> Figures:
    """Log and save `num_chunks` chunks of random latents in `folder`."""
    generator = torch.Generator().manual_seed(0)
    texts = [_text(prompt, num_tokens, generator, dtype) for prompt in PROMPTS]
    log, store = StreamLog(folder / "log"), SnapshotStore(folder / "snapshot")
    points = SavedResumePoints(
        store=store, log=log.path, run_id="", identity=identity(StreamSetup.of(StreamConfig()))
    )
    log.append(opened())
    begun_at = log.offset
    stream = _Stream(texts, num_chunks=num_chunks, num_events=num_events)
    save_ms, log_ms, written = list[float](), list[float](), list[int]()
    before = set[int]()
    for index in range(num_chunks):
        latents = torch.randn(LATENTS_SHAPE, generator=generator).to(dtype)
        point = stream.next(latents)
        start_s = time.perf_counter()
        log.append(replace(finished(index)[0], latents=spec_of(LATENTS_OUT, latents)))
        log.append(durable(index))
        log_ms.append((time.perf_counter() - start_s) * 1e3)
        start_s = time.perf_counter()
        points.begin(point, log=log)()
        save_ms.append((time.perf_counter() - start_s) * 1e3)
        there = {file.stat().st_ino: file.stat().st_size for file in store.folder.iterdir()}
        written.append(sum(size for inode, size in there.items() if inode not in before))
        before = set(there)
    assert log.failure is None, log.failure
    log.close()
    return Figures(
        num_kept=len(point.tail.chunks),
        save_ms=save_ms,
        log_ms=log_ms,
        folder_bytes=sum(file.stat().st_size for file in store.folder.iterdir()),
        written_bytes=int(statistics.median(written)),
        log_bytes=(log.offset - begun_at) // num_chunks,
    )


class _Stream:
    """Where a stream is resumed after each of its chunks, `NUM_PENDING` of them pending."""

    def __init__(self, texts: list[Conditioning], *, num_chunks: int, num_events: int) -> None:
        self._text, self._tail, self._pending = texts[0], StreamTail(), list[PendingChunk]()
        self._later = tuple(
            ScheduledDirective(
                chunk_index=num_chunks + index,
                directive=Directive(conditioning=texts[index % len(texts)]),
            )
            for index in range(num_events)
        )
        self._planner = Planner(
            settings=StreamSettings(
                plan_id=PlanId.SINGLE,
                recipe=RECIPE,
                height=HEIGHT,
                width=WIDTH,
                base_seed=0,
                recompute_every=1,
            )
        )
        self._sinks = torch.empty(0)

    def next(self, latents: Tensor) -> ResumePoint:
        """After a chunk more."""
        envelope, self._planner = self._planner.next(hard_cut=False, new_text=False)
        counts = self._planner.counts
        chunk = TailChunk(
            start_frame=envelope.current_start_frame,
            latents=latents,
            latents_sha256=sha256_of(latents),
        )
        self._pending = [*self._pending, self._arrived(envelope)][-NUM_PENDING:]
        self._tail = self._tail.followed_by(chunk, sinks=self._sinks).trimmed(
            num_pending=len(self._pending), num_frames=NUM_TAIL_FRAMES
        )
        return ResumePoint(
            base_seed=7,
            kv_cache_attention_bias=1.0,
            counts=counts,
            conditioning=self._text,
            transition=None,
            asked_again=(),
            first_scheduled=counts.next_chunk_index,
            later=self._later,
            num_acknowledged=counts.next_chunk_index - len(self._pending),
            pending=tuple(self._pending),
            tail=self._tail,
        )

    def _arrived(self, envelope: PPEnvelope) -> PendingChunk:
        return PendingChunk(
            envelope=envelope,
            prompt=self._text.prompt,
            generator_calls=envelope.expected_generator_calls,
            stage_ms=STAGE_MS,
        )


def _text(
    prompt: str, num_tokens: int, generator: torch.Generator, dtype: torch.dtype
) -> Conditioning:
    """Embeddings of which all but the first tokens are padding."""
    embeds = torch.zeros(TEXT_SHAPE)
    embeds[:, :num_tokens] = torch.randn(1, num_tokens, TEXT_SHAPE[2], generator=generator)
    return Conditioning(prompt, embeds.to(dtype))


def _spread(times_ms: list[float]) -> str:
    """The first save writes all there is; it counts like the others."""
    p95_ms = statistics.quantiles(times_ms, n=20)[-1]
    return (
        f"ms: median {statistics.median(times_ms):.2f}, p95 {p95_ms:.2f}, max {max(times_ms):.2f}"
    )
