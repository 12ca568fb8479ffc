"""What verifying numbers and state costs a chunk, by level, side by side in one run.

One rank generates and decodes the embedded model's chunks, three sessions taking turns chunk by
chunk, so that a busy machine slows all levels alike. Time is counted by cycles of as many chunks as
one audit's turn has: some parts have a turn only in one of these, and none may fall out of a
median. CPU time is that of the process; wall time is what a busy machine stretches.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch

from scope_contracts.integrity import IntegrityLevel
from scope_lab.counted_costs import WAN_AT_480P, table
from scope_lab.integrity_parts import parts_of
from scope_rt.config import StreamConfig
from scope_rt.control.chunk import Chunk
from scope_rt.integrity.verifier import AUDITED_CHUNKS
from scope_rt.session import StreamSession
from scope_runners.command_parser import CommandParser

PROMPT = "a red circle and a blue square, fast, on navy"
CYCLE = AUDITED_CHUNKS
"""Chunks in which every part has had a turn that has one more often than the fixed chunk."""
_WARM_UP_CHUNKS = CYCLE


@dataclass(slots=True)
class Times:
    """Milliseconds of each chunk of one level."""

    cpu_ms: list[float] = field(default_factory=list)
    wall_ms: list[float] = field(default_factory=list)

    def take(self, stream: Iterator[Chunk]) -> None:
        """Time the next chunk of `stream`."""
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        next(stream)
        self.cpu_ms.append((time.process_time() - cpu_s) * 1e3)
        self.wall_ms.append((time.perf_counter() - wall_s) * 1e3)


def main(argv: Sequence[str]) -> int:
    """Measure and print a table; exit code 0."""
    parser = CommandParser(prog="scripts/lab bench_integrity", description=__doc__)
    parser.add_argument("--chunks", type=int, default=200, help="of each level (default 200)")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch (default 1)")
    parser.add_argument("--kv-cache", default="ring", help="as scope-rt stream takes it")
    parser.add_argument("--dtype", default="float32", help="of weights and cache")
    parser.add_argument(
        "--parts",
        choices=[level for level in IntegrityLevel if level is not IntegrityLevel.OFF],
        help="what each part takes at this level, in place of the levels side by side",
    )
    parser.add_argument(
        "--counted",
        action="store_true",
        help="count FLOPs and bytes at the shapes of Wan 2.1 1.3B instead, which takes no time",
    )
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    settings = {"kv_cache": arguments.kv_cache, "dtype": arguments.dtype}
    if arguments.counted:
        _print_counted()
        return 0
    if arguments.parts is not None:
        _print_parts(IntegrityLevel(arguments.parts), arguments.chunks, **settings)
        return 0
    times = measure(arguments.chunks, **settings)
    print(f"{'level':<8} {'CPU ms a chunk':>15} {'more':>8} {'wall ms a chunk':>16} {'more':>8}")
    for level, each in times.items():
        off = times[IntegrityLevel.OFF]
        cpu, more_cpu = _beside(each.cpu_ms, off.cpu_ms)
        wall, more_wall = _beside(each.wall_ms, off.wall_ms)
        print(f"{level:<8} {cpu:>15.2f} {more_cpu:>8.2%} {wall:>16.2f} {more_wall:>8.2%}")
    return 0


def _beside(mine_ms: Sequence[float], off_ms: Sequence[float]) -> tuple[float, float]:
    """The median cycle, and how much more a chunk takes than with `off` in the same cycle."""
    mine, off = _by_cycle(mine_ms), _by_cycle(off_ms)
    more_ms = statistics.median(mine - theirs for mine, theirs in zip(mine, off, strict=True))
    return statistics.median(mine), more_ms / statistics.median(off)


def _by_cycle(each_ms: Sequence[float]) -> list[float]:
    starts = range(0, len(each_ms), CYCLE)
    return [statistics.mean(each_ms[start : start + CYCLE]) for start in starts]


def _print_counted() -> None:
    for window_frames in (21, 12, 6):
        print(table(replace(WAN_AT_480P, window_frames=window_frames)), end="\n\n")


def _print_parts(level: IntegrityLevel, num_chunks: int, **settings: str) -> None:
    def stream() -> Iterator[Chunk]:
        with StreamSession(StreamConfig.of(integrity=level, **settings)) as session:
            yield from session.stream(PROMPT)

    print(parts_of(stream, num_chunks=num_chunks, warm_up=CYCLE))


def measure(num_chunks: int, **settings: str) -> dict[IntegrityLevel, Times]:
    """Of each chunk of whole cycles, by level."""
    num_chunks = _WARM_UP_CHUNKS + max(CYCLE, num_chunks - num_chunks % CYCLE)
    times = {level: Times() for level in IntegrityLevel}
    with ExitStack() as sessions:
        streams: dict[IntegrityLevel, Iterator[Chunk]] = {}
        for level in IntegrityLevel:
            config = StreamConfig.of(integrity=level, **settings)
            session = sessions.enter_context(StreamSession(config))
            streams[level] = session.stream(PROMPT, num_chunks=num_chunks)
        levels = list(IntegrityLevel)
        for chunk in range(num_chunks):
            if chunk == _WARM_UP_CHUNKS:
                times = {level: Times() for level in IntegrityLevel}
            turn = chunk % len(levels)
            for level in levels[turn:] + levels[:turn]:
                times[level].take(streams[level])
        for stream in streams.values():
            list(stream)
    return times
