"""What it costs to be able to resume: bytes and milliseconds a chunk, at 480x832 and Wan's sizes.

The state is what a stream keeps for a codec whose pictures depend on 38 latent frames: the latents
of 13 chunks and the text in effect, and no memory of the decoder, however large that is.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from scope_contracts.envelope import LATENTS_OUT, PlanId
from scope_contracts.log_records import Durable, Finished, Opened
from scope_contracts.tensor_spec import DType
from scope_rt.record.snapshot import SnapshotHeader, SnapshotStore
from scope_rt.record.stream_log import StreamLog
from scope_rt.tensors import TORCH_DTYPES, spec_of

LATENTS_SHAPE = (1, 3, 16, 60, 104)
TEXT_SHAPE = (1, 512, 4096)
DECODER_FRAMES = 38
NUM_PENDING = 2
MOST_BYTES, MOST_MS = 10e6, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkState:
    """A finished chunk, as a stream keeps it to decode it again."""

    chunk_index: int
    prompt: str
    latents: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchState:
    """A stream between two chunks."""

    prompt: str
    embeds: Tensor
    chunks: tuple[ChunkState, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one run; milliseconds of every save and of what is appended to the log for a chunk."""

    save_ms: list[float]
    log_ms: list[float]
    folder_bytes: int
    written_bytes: int
    log_bytes: int


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 if a save is over a bar."""
    parser = argparse.ArgumentParser(prog="scripts/lab bench_snapshot", description=__doc__)
    parser.add_argument("--chunks", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=40, help="of the prompt; the rest is padding")
    parser.add_argument("--dtype", type=DType, default=DType.BFLOAT16)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: a temporary)")
    asked = parser.parse_args(sys.argv[1:] if argv is None else argv)
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        figures = measure(
            Path(folder),
            num_chunks=asked.chunks,
            num_tokens=asked.tokens,
            dtype=TORCH_DTYPES[asked.dtype],
        )
    median_ms = statistics.median(figures.save_ms)
    num_kept = -(-DECODER_FRAMES // LATENTS_SHAPE[1]) + NUM_PENDING
    print(
        f"{asked.chunks} chunks of {asked.dtype} latents {LATENTS_SHAPE}, {num_kept} of them kept, "
        f"text {TEXT_SHAPE} with {asked.tokens} tokens"
    )
    print(
        f"snapshot   {figures.folder_bytes / 1e6:.2f} MB in all (bar {MOST_BYTES / 1e6:.0f}), "
        f"{figures.written_bytes / 1e6:.2f} MB written a save; {_spread(figures.save_ms)} "
        f"(bar {MOST_MS:.0f} for the median)"
    )
    print(f"stream log {figures.log_bytes} bytes a chunk; {_spread(figures.log_ms)}")
    return int(figures.folder_bytes > MOST_BYTES or median_ms > MOST_MS)


def measure(folder: Path, *, num_chunks: int, num_tokens: int, dtype: torch.dtype) -> Figures:
    """Log and save `num_chunks` chunks of random latents in `folder`."""
    generator = torch.Generator().manual_seed(0)
    embeds = torch.zeros(TEXT_SHAPE, dtype=dtype)
    embeds[:, :num_tokens] = torch.randn(1, num_tokens, TEXT_SHAPE[2], generator=generator)
    chunks = deque[ChunkState](maxlen=-(-DECODER_FRAMES // LATENTS_SHAPE[1]) + NUM_PENDING)
    log, store = StreamLog(folder / "log"), SnapshotStore(folder / "snapshot")
    log.append(_opened())
    begun_at = log.offset
    save_ms, log_ms, written = list[float](), list[float](), list[int]()
    before = set[int]()
    for index in range(num_chunks):
        latents = torch.randn(LATENTS_SHAPE, generator=generator).to(dtype)
        chunks.append(ChunkState(chunk_index=index, prompt="a red circle", latents=latents))
        start_s = time.perf_counter()
        log.append(_finished(index, latents))
        log.append(_durable(index))
        log_ms.append((time.perf_counter() - start_s) * 1e3)
        state = BenchState(prompt="a red circle", embeds=embeds, chunks=tuple(chunks))
        header = SnapshotHeader(
            run_id="", identity=(), log="log", log_offset=log.offset, next_chunk_index=index + 1
        )
        start_s = time.perf_counter()
        store.save(header, state)
        save_ms.append((time.perf_counter() - start_s) * 1e3)
        there = {file.stat().st_ino: file.stat().st_size for file in store.folder.iterdir()}
        written.append(sum(size for inode, size in there.items() if inode not in before))
        before = set(there)
    assert log.failure is None, log.failure
    log.close()
    return Figures(
        save_ms=save_ms,
        log_ms=log_ms,
        folder_bytes=sum(file.stat().st_size for file in store.folder.iterdir()),
        written_bytes=int(statistics.median(written)),
        log_bytes=(log.offset - begun_at) // num_chunks,
    )


def _spread(times_ms: list[float]) -> str:
    """The first save writes all there is; it counts like the others."""
    p95_ms = statistics.quantiles(times_ms, n=20)[-1]
    return (
        f"ms: median {statistics.median(times_ms):.2f}, p95 {p95_ms:.2f}, max {max(times_ms):.2f}"
    )


def _opened() -> Opened:
    return Opened(
        at_s=time.time(),
        package_version="bench",
        torch_version=str(torch.__version__),
        model="bench",
        model_fingerprint="",
        plan_id=PlanId.SINGLE,
        tp_degree=1,
        height=480,
        width=832,
        dtype=DType.BFLOAT16,
        base_seed=0,
        kv_cache_attention_bias=1.0,
        backend="",
        kv_cache_recompute_every=0,
        recompute_anchor="",
        frames_per_block=3,
        fps=16,
    )


def _finished(index: int, latents: Tensor) -> Finished:
    return Finished(
        at_s=time.time(),
        chunk_index=index,
        cache_epoch=0,
        prompt="a red circle",
        num_frames=12,
        observed_generator_calls=5,
        recomputed=False,
        kv_cache_attention_bias=1.0,
        latents_sha256="ab" * 32,
        latents=spec_of(LATENTS_OUT, latents),
        stage_ms=(("plan", 0.5), ("generate", 400.0), ("wait", 1.0), ("decode", 90.0)),
    )


def _durable(index: int) -> Durable:
    return Durable(
        at_s=time.time(),
        chunk_index=index,
        segment=0,
        end_bytes=index,
        num_frames=12,
        crc32=0,
        encode_ms=1.0,
    )


if __name__ == "__main__":
    raise SystemExit(main())
