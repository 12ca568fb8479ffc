"""Memory is flat when no process that lives long grows, and none is born larger than the last.

Ranks are compared with each other at an equal number of chunks, since they are started again and
again; within one life they are watched where it is long.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scope_lab.soak.event_log import MemorySampled

LAUNCHER, FORK_SERVER = -1, -2
MOST_GROWTH_BYTES = 16 * 2**20
"""What a process may grow over a soak, or a rank over a life, by the slope of its samples."""
AGE_CHUNKS = 16
"""At this many chunks ranks are compared with each other; after it they should not grow."""
LONG_S = 300.0
"""A soak of more video than this has a calm part in which ranks live long enough to be watched."""
_WARM_UP = 0.1
_FEWEST = 8
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """How one process grows; sizes in bytes. `growth_bytes` is the slope times the time seen."""

    process: str
    rank: int
    """As of `MemorySampled`: below 0 it is none."""
    median_bytes: int
    slope_per_hour: float
    seen_s: float
    num_samples: int

    @property
    def growth_bytes(self) -> float:
        return self.slope_per_hour * self.seen_s / 3600

    @property
    def is_flat(self) -> bool:
        return self.growth_bytes <= MOST_GROWTH_BYTES


def rss_bytes(pid: int) -> int | None:
    """Resident memory of a process; None where it is gone."""
    fields = _status(pid)
    return int(fields["VmRSS"].split()[0]) * 1024 if "VmRSS" in fields else None


def parent_of(pid: int) -> int | None:
    """The process that forked `pid`; None where it is gone."""
    fields = _status(pid)
    return int(fields["PPid"]) if fields else None


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def growths(samples: Iterable[MemorySampled]) -> list[Growth]:
    """How every process of a soak grows, where there are enough samples."""
    by_life = defaultdict[tuple[int, int], list[MemorySampled]](list)
    lasting = defaultdict[int, list[MemorySampled]](list)
    for sample in samples:
        if sample.rank < 0:
            lasting[sample.rank].append(sample)
        else:
            by_life[sample.rank, sample.attempt].append(sample)
    names = {LAUNCHER: "launcher", FORK_SERVER: "fork server"}
    found = [
        _growth(names[rank], own[round(_WARM_UP * len(own)) :])
        for rank, own in sorted(lasting.items(), reverse=True)
    ]
    for rank in sorted({rank for rank, _ in by_life}):
        lives = [own for (of, _), own in by_life.items() if of == rank]
        ripe = [[s for s in life if s.num_shown >= AGE_CHUNKS] for life in lives]
        grown = [life for life in ripe if life]
        found.append(_growth(f"rank {rank} from start to start", [life[0] for life in grown]))
        longest = max(grown, key=lambda life: life[-1].at_s - life[0].at_s, default=[])
        found.append(_growth(f"rank {rank} in its longest life", longest))
    return [growth for growth in found if growth is not None]


def complaints(grown: Sequence[Growth], *, stream_s: float) -> list[str]:
    """What grew, and what was not watched in a stream of so many seconds."""
    if not grown:
        return ["no process was seen for long enough to tell whether it grows"]
    found = [
        f"{growth.process} grew by {growth.growth_bytes / _MIB:.1f} MiB, "
        f"not {MOST_GROWTH_BYTES // _MIB} at most"
        for growth in grown
        if not growth.is_flat
    ]
    if stream_s > LONG_S and all(growth.rank < 0 for growth in grown):
        found.append("no rank was seen for long enough to tell whether it grows")
    return found


def watched(grown: Sequence[Growth]) -> str:
    """The processes that were seen for long enough, for a sentence that calls them flat."""
    names = [growth.process for growth in grown if growth.rank < 0]
    ranks = sorted({growth.rank for growth in grown if growth.rank >= 0})
    names += [f"rank {rank}" for rank in ranks] or ["no rank lived long enough to tell"]
    return ", ".join(names)


def _growth(process: str, samples: Sequence[MemorySampled]) -> Growth | None:
    if len(samples) < _FEWEST:
        return None
    return Growth(
        process=process,
        rank=samples[0].rank,
        median_bytes=round(statistics.median(s.rss_bytes for s in samples)),
        slope_per_hour=_slope([(s.at_s, s.rss_bytes) for s in samples]) * 3600,
        seen_s=samples[-1].at_s - samples[0].at_s,
        num_samples=len(samples),
    )


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Theil and Sen: the median of the slopes between points half of the way apart."""
    half = len(points) // 2
    pairs = zip(points, points[half:], strict=False)
    return statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs)
