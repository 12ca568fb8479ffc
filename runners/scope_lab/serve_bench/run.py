"""What viewers and recordings cost the ranks of a served stream, and whether memory stays bounded.

Turn by turn, in one run: the stream alone; with viewers, some of which never read, and recordings;
and beside as much work that has nothing to do with the stream, since on most machines a busy core
slows the others down. Where there are four cores, rank0 and the server have one each and viewers
the others; with fewer they share all, and the viewers' own work counts as well.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from scope_lab.serve_bench.server_process import ServerProcess, cpu_seconds, memory_mib
from scope_runners.command_parser import CommandParser

MOST_LOSS = 0.03
"""Of rank0's frames a second: the bar."""
_SETTLE_S, _LOOK_S = 3.0, 10.0
_OF_RANK0 = ("plan", "wait", "generate", "decode", "digest")


def main(argv: Sequence[str]) -> int:
    """Print a line a turn, and the result; 1 where too few frames are shown, or where rank0 loses
    too much more with viewers than beside other work."""
    parser = CommandParser(prog="scripts/lab bench-serve", description=__doc__)
    parser.add_argument("--viewers", type=int, default=50)
    parser.add_argument("--silent", type=int, default=5, help="of them, that never read")
    parser.add_argument("--recordings", type=int, default=2)
    parser.add_argument("--turns", type=int, default=8, help="each between two without viewers")
    parser.add_argument("--turn-s", type=float, default=8.0)
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
    """Each turn with viewers, and each beside other work of as many CPU seconds, against the two
    beside it alone: a machine that becomes slower or faster meanwhile changes little."""
    alone, shown = [_turn(server, namespace.turn_s)], list[float]()
    watched, beside = _Differences(), _Differences()
    for turn in range(namespace.turns):
        with (
            _viewers(server, namespace, cores) as viewers,
            _recordings(server, namespace.recordings, turn),
        ):
            pids = {cores[1 % len(cores)]: server.pids()["server"], cores[-1]: viewers}
            cpu_s, began_s = _cpu_seconds(pids), time.monotonic()
            with_viewers = _turn(server, namespace.turn_s)
            spent_s = time.monotonic() - began_s
            parts = {
                core: (now - cpu_s[core]) / spent_s for core, now in _cpu_seconds(pids).items()
            }
            stats = server.session()["stats"]
            shown.append(stats["frames_per_s"])
        alone.append(_turn(server, namespace.turn_s))
        watched.add(alone[-2], with_viewers, alone[-1])
        with _other_work(parts):
            with_other_work = _turn(server, namespace.turn_s)
        alone.append(_turn(server, namespace.turn_s))
        beside.add(alone[-2], with_other_work, alone[-1])
        print(
            f"turn {turn}: frames/s of rank0 {alone[-3].frames_per_s:.1f} alone, "
            f"{with_viewers.frames_per_s:.1f} with {stats['viewers']} viewers, "
            f"{alone[-2].frames_per_s:.1f} alone, {with_other_work.frames_per_s:.1f} beside other "
            f"work of {' and '.join(f'{100 * part:.0f} %' for part in parts.values())} of a core, "
            f"{alone[-1].frames_per_s:.1f} alone; shown {shown[-1]:.2f}; drops {stats['drops']}",
            flush=True,
        )
    still = [1 - two.frames_per_s / one.frames_per_s for one, two in pairwise(alone)]
    print(
        f"shown with {namespace.viewers} viewers ({namespace.silent} never read) and "
        f"{namespace.recordings} recordings: {median(shown):.2f} frames/s of "
        f"{server.session()['fps']} (bar {100 * MOST_LOSS:g} % fewer)\n"
        "rank0 while it works, medians and quartiles:\n"
        f"  with them: {_spread(watched.less)} fewer frames/s than alone, "
        f"{_spread(watched.more_cpu)} more CPU a chunk\n"
        f"  beside other work of the same cores: {_spread(beside.less)} fewer, "
        f"{_spread(beside.more_cpu)} more CPU\n"
        f"  two turns alone: {_spread(still)} fewer in the later one"
    )
    own = median(watched.less) - median(beside.less)
    return max(own, 1 - median(shown) / float(server.session()["fps"]))


class _Differences:
    """Of turns of one kind from those alone before and after them."""

    def __init__(self) -> None:
        self.less: list[float] = []
        self.more_cpu: list[float] = []

    def add(self, before: Turn, turn: Turn, after: Turn) -> None:
        self.less.append(1 - 2 * turn.frames_per_s / (before.frames_per_s + after.frames_per_s))
        self.more_cpu.append(2 * turn.cpu_ms / (before.cpu_ms + after.cpu_ms) - 1)


def _spread(values: Sequence[float]) -> str:
    """Median and quartiles, in percent."""
    low, middle, high = quantiles(values, n=4) if len(values) > 1 else 3 * [values[0]]
    return f"{100 * middle:+.1f} % ({100 * low:+.1f} to {100 * high:+.1f})"


def _cpu_seconds(pids: Mapping[int, int]) -> dict[int, float]:
    return {core: cpu_seconds(pid) for core, pid in pids.items()}


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
def _viewers(server: ServerProcess, namespace: Any, cores: Sequence[int]) -> Iterator[int]:
    """The process that they are in."""
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
        yield process.pid
    finally:
        print(f"viewers had {process.communicate('', timeout=60)[0].strip()}")


@contextmanager
def _other_work(parts: Mapping[int, float]) -> Iterator[None]:
    """So much of each core."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "scope_lab.serve_bench.other_work"),
            *(f"{core}:{part:.3f}" for core, part in parts.items()),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield
    finally:
        process.communicate("", timeout=60)


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
