"""Measured seconds are counted below fixed bounds, so that counts of servers can be added."""

from bisect import bisect_left
from dataclasses import dataclass, field

BOUNDS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 60.0),
)
"""From a conversion of pictures to a prompt that waits for ranks to start again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramCounts:
    """A copy of a histogram: `cumulative[i]` values were at most `BOUNDS_S[i]`, all are `count`."""

    cumulative: tuple[int, ...]
    count: int
    sum_s: float


@dataclass(slots=True)
class Histogram:
    """Not locked: its owner is."""

    _counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    _sum_s: float = 0.0

    def observe(self, seconds: float) -> None:
        """Count one value; a bound belongs to the values below it."""
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    def counts(self) -> HistogramCounts:
        """As it is now."""
        total, cumulative = 0, []
        for count in self._counts:
            total += count
            cumulative.append(total)
        return HistogramCounts(cumulative=tuple(cumulative[:-1]), count=total, sum_s=self._sum_s)
