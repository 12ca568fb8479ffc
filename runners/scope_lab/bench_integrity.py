"""What verifying numbers and state costs a chunk, by level, side by side in one run.

One rank generates and decodes the embedded model's chunks, three sessions taking turns chunk by
chunk, so that a busy machine slows all levels alike. CPU time of the process is counted, by cycles
of 8 chunks: some parts have a turn only in one of these, and none may fall out of a median.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

from scope_contracts.integrity import IntegrityLevel
from scope_lab.counted_costs import WAN_AT_480P, table
from scope_lab.integrity_parts import parts_of
from scope_rt.config import StreamConfig
from scope_rt.control.chunk import Chunk
from scope_rt.session import StreamSession

PROMPT = "a red circle and a blue square, fast, on navy"
CYCLE = 8
"""Chunks in which every part has had a turn that has one more often than the fixed chunk."""
_WARM_UP_CHUNKS = CYCLE


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table; exit code 0."""
    parser = argparse.ArgumentParser(prog="scripts/lab bench_integrity", description=__doc__)
    parser.add_argument("--chunks", type=int, default=200, help="of each level (default 200)")
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
    arguments = parser.parse_args(sys.argv[1:] if argv is None else argv)
    settings = {"kv_cache": arguments.kv_cache, "dtype": arguments.dtype}
    if arguments.counted:
        _print_counted()
        return 0
    if arguments.parts is not None:
        _print_parts(IntegrityLevel(arguments.parts), arguments.chunks, **settings)
        return 0
    cpu_ms = measure(arguments.chunks, **settings)
    base_ms = statistics.median(cpu_ms[IntegrityLevel.OFF])
    print(f"{'level':<8} {'CPU ms a chunk':>15} {'more than off':>14}")
    for level, each_ms in cpu_ms.items():
        pairs = zip(each_ms, cpu_ms[IntegrityLevel.OFF], strict=True)
        more_ms = statistics.median(mine - theirs for mine, theirs in pairs)
        print(f"{level:<8} {statistics.median(each_ms):>15.2f} {more_ms / base_ms:>14.2%}")
    return 0


def _print_counted() -> None:
    for window_frames in (21, 12, 6):
        print(table(replace(WAN_AT_480P, window_frames=window_frames)), end="\n\n")


def _print_parts(level: IntegrityLevel, num_chunks: int, **settings: str) -> None:
    def stream() -> Iterator[Chunk]:
        with StreamSession(StreamConfig.of(integrity=level, **settings)) as session:
            yield from session.stream(PROMPT)

    print(parts_of(stream, num_chunks=num_chunks, warm_up=2 * CYCLE))


def measure(num_chunks: int, **settings: str) -> dict[IntegrityLevel, list[float]]:
    """CPU milliseconds a chunk, of every cycle, by level."""
    num_chunks -= num_chunks % CYCLE
    cpu_ms: dict[IntegrityLevel, list[float]] = {level: [] for level in IntegrityLevel}
    with ExitStack() as sessions:
        streams: dict[IntegrityLevel, Iterator[Chunk]] = {}
        for level in IntegrityLevel:
            config = StreamConfig.of(integrity=level, **settings)
            session = sessions.enter_context(StreamSession(config))
            streams[level] = session.stream(PROMPT, num_chunks=num_chunks + _WARM_UP_CHUNKS)
        levels = list(IntegrityLevel)
        for chunk in range(num_chunks + _WARM_UP_CHUNKS):
            turn = chunk % len(levels)
            for level in levels[turn:] + levels[:turn]:
                start_s = time.process_time()
                next(streams[level])
                if chunk >= _WARM_UP_CHUNKS:
                    cpu_ms[level].append((time.process_time() - start_s) * 1e3)
        for stream in streams.values():
            list(stream)
    starts = range(0, num_chunks, CYCLE)
    return {
        level: [statistics.mean(each_ms[start : start + CYCLE]) for start in starts]
        for level, each_ms in cpu_ms.items()
    }


if __name__ == "__main__":
    raise SystemExit(main())
