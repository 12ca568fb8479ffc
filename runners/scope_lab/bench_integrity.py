"""What verifying numbers and state costs a chunk, by level, side by side in one run.

One rank generates and decodes the embedded model's chunks, three sessions taking turns chunk by
chunk, so that a busy machine slows all levels alike. CPU time of the process is counted.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from scope_contracts.integrity import IntegrityLevel
from scope_rt.config import StreamConfig
from scope_rt.control.chunk import Chunk
from scope_rt.session import StreamSession

PROMPT = "a red circle and a blue square, fast, on navy"
_WARM_UP_CHUNKS = 4


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table; exit code 0."""
    parser = argparse.ArgumentParser(prog="scripts/lab bench_integrity", description=__doc__)
    parser.add_argument("--chunks", type=int, default=200, help="of each level (default 200)")
    parser.add_argument("--kv-cache", default="ring", help="as scope-rt stream takes it")
    parser.add_argument("--dtype", default="float32", help="of weights and cache")
    arguments = parser.parse_args(sys.argv[1:] if argv is None else argv)
    cpu_ms = measure(arguments.chunks, kv_cache=arguments.kv_cache, dtype=arguments.dtype)
    base_ms = statistics.median(cpu_ms[IntegrityLevel.OFF])
    print(f"{'level':<8} {'CPU ms a chunk':>15} {'more than off':>14}")
    for level, each_ms in cpu_ms.items():
        pairs = zip(each_ms, cpu_ms[IntegrityLevel.OFF], strict=True)
        more_ms = statistics.median(mine - theirs for mine, theirs in pairs)
        print(f"{level:<8} {statistics.median(each_ms):>15.2f} {more_ms / base_ms:>14.2%}")
    return 0


def measure(num_chunks: int, *, kv_cache: str, dtype: str) -> dict[IntegrityLevel, list[float]]:
    """CPU milliseconds of every chunk, by level."""
    cpu_ms: dict[IntegrityLevel, list[float]] = {level: [] for level in IntegrityLevel}
    with ExitStack() as sessions:
        streams: dict[IntegrityLevel, Iterator[Chunk]] = {}
        for level in IntegrityLevel:
            config = StreamConfig.of(integrity=level, kv_cache=kv_cache, dtype=dtype)
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
    return cpu_ms


if __name__ == "__main__":
    raise SystemExit(main())
