"""What viewers and recordings cost the ranks of a served stream, and whether memory stays bounded.

Turn by turn, in one run: the stream alone, and the stream with viewers, some of which never read,
and recordings. Where there are four cores, rank0 and the server have one each and viewers the
others; with fewer they share all, and the viewers' own work counts as well.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from scope_lab.serve_bench.server_process import ServerProcess, cpu_seconds, memory_mib
from scope_runners.command_parser import CommandParser

MOST_LOSS = 0.03
"""Of rank0's frames a second: the bar."""
_SETTLE_S, _LOOK_S = 3.0, 10.0
_OF_RANK0 = ("plan", "wait", "generate", "decode", "digest")


def main(argv: Sequence[str]) -> int:
    """Print a line a turn, and the result; 1 where rank0 loses more than it may."""
    parser = CommandParser(prog="scripts/lab bench-serve", description=__doc__)
    parser.add_argument("--viewers", type=int, default=50)
    parser.add_argument("--silent", type=int, default=5, help="of them, that never read")
    parser.add_argument("--recordings", type=int, default=2)
    parser.add_argument("--turns", type=int, default=4, help="of each kind")
    parser.add_argument("--turn-s", type=float, default=20.0)
    parser.add_argument("--minutes", type=float, default=0.0, help="then watch memory so long")
    namespace, rest = parser.parse_known_args(argv)
    cores = sorted(os.sched_getaffinity(0))
    print(f"cores {len(cores)}, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory(prefix="bench-serve-") as folder:
        arguments = ["--max-viewers", str(namespace.viewers + 8), *rest]
        server = ServerProcess(Path(folder), arguments)
        try:
            server.pin(cores)
            loss = _compare(server, namespace, cores)
            if namespace.minutes:
                _watch_memory(server, namespace, cores)
        finally:
            server.close()
    return int(loss > MOST_LOSS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What rank0 did in one turn."""

    frames_per_s: float
    """While it works on a chunk: frames of one over the time of its stages, the median chunk."""
    cpu_ms: float
    """Of its process, a chunk: waiting for a core is not in it."""


def _compare(server: ServerProcess, namespace: Any, cores: Sequence[int]) -> float:
    alone: list[Turn] = []
    watched: list[Turn] = []
    shown: list[float] = []
    for turn in range(namespace.turns):
        alone.append(_turn(server, namespace.turn_s))
        with _viewers(server, namespace, cores), _recordings(server, namespace.recordings, turn):
            watched.append(_turn(server, namespace.turn_s))
            stats = server.session()["stats"]
            shown.append(stats["frames_per_s"])
            print(
                f"turn {turn}: rank0 {alone[-1].frames_per_s:.1f} frames/s alone, "
                f"{watched[-1].frames_per_s:.1f} with {stats['viewers']} viewers; shown "
                f"{shown[-1]:.2f}; drops {stats['drops']}"
            )
    loss = 1 - _median(watched).frames_per_s / _median(alone).frames_per_s
    more = _median(watched).cpu_ms / _median(alone).cpu_ms - 1
    print(
        f"rank0: {_median(alone).frames_per_s:.1f} frames/s while it works, alone; "
        f"{_median(watched).frames_per_s:.1f} with {namespace.viewers} viewers "
        f"({namespace.silent} never read) and {namespace.recordings} recordings: "
        f"{100 * loss:+.1f} % less (bar {100 * MOST_LOSS:g} %), {100 * more:+.1f} % CPU a chunk; "
        f"shown {median(shown):.2f} of {server.session()['fps']}"
    )
    return loss


def _median(turns: Sequence[Turn]) -> Turn:
    return Turn(
        frames_per_s=median(turn.frames_per_s for turn in turns),
        cpu_ms=median(turn.cpu_ms for turn in turns),
    )


def _turn(server: ServerProcess, seconds: float) -> Turn:
    time.sleep(_SETTLE_S)
    rank0, works_ms = server.pids()["rank0"], list[float]()
    first = seen = server.session()["stats"]["chunks"]
    cpu_s, deadline_s = cpu_seconds(rank0), time.monotonic() + seconds
    while time.monotonic() < deadline_s:
        stats = server.session()["stats"]
        if stats["chunks"] != seen:
            seen, newest = stats["chunks"], stats["newest_ms"]
            works_ms.append(sum(newest.get(stage, 0.0) for stage in _OF_RANK0))
        time.sleep(0.1)
    session = server.session()
    return Turn(
        frames_per_s=1e3 * session["chunk_s"] * session["fps"] / median(works_ms),
        cpu_ms=1e3 * (cpu_seconds(rank0) - cpu_s) / max(1, session["stats"]["chunks"] - first),
    )


def _watch_memory(server: ServerProcess, namespace: Any, cores: Sequence[int]) -> None:
    with _viewers(server, namespace, cores), _recordings(server, namespace.recordings, 10**6):
        time.sleep(60.0)  # caches and buffers fill
        first = {name: memory_mib(pid) for name, pid in server.pids().items()}
        highest = dict(first)
        deadline_s = time.monotonic() + 60 * namespace.minutes
        while time.monotonic() < deadline_s:
            time.sleep(min(_LOOK_S, 60 * namespace.minutes))
            for name, pid in server.pids().items():
                highest[name] = max(highest.get(name, 0.0), memory_mib(pid))
        last = {name: memory_mib(pid) for name, pid in server.pids().items()}
        stats = server.session()["stats"]
    for name in first:
        print(
            f"memory over {namespace.minutes:g} minutes, {name}: {first[name]:.0f} MiB at first, "
            f"{last[name]:.0f} at the end, {highest[name]:.0f} at most"
        )
    print(f"stalls {stats['stalls']}, drops {stats['drops']}, chunks {stats['chunks']}")


@contextmanager
def _viewers(server: ServerProcess, namespace: Any, cores: Sequence[int]) -> Iterator[None]:
    num_reading = namespace.viewers - namespace.silent
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "scope_lab.serve_bench.viewers"),
            *(server.url, server.base, str(num_reading), str(namespace.silent)),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    if len(cores) >= 4:
        os.sched_setaffinity(process.pid, set(cores[2:]))
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield
    finally:
        print(f"viewers had {process.communicate('', timeout=60)[0].strip()}")


@contextmanager
def _recordings(server: ServerProcess, num: int, turn: int) -> Iterator[None]:
    names = [f"turn{turn}-{number}" for number in range(num)]
    for name in names:
        server.command(kind="record_start", name=name)
    try:
        yield
    finally:
        for name in names:
            server.command(kind="record_stop", name=name)
