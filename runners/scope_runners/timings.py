"""What each stage costs, for a stream of any length in memory that does not grow."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

_WINDOW = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSummary:
    """One stage in figures; the percentiles are over its latest measurements (4096 at most)."""

    count: int
    total_ms: float
    p50_ms: float
    p95_ms: float


class StageTimings:
    """Accumulates milliseconds per stage; stages appear in the order of their first measurement."""

    def __init__(self) -> None:
        self._recent_ms: dict[str, deque[float]] = {}
        self._count: dict[str, int] = {}
        self._total_ms: dict[str, float] = {}

    def add(self, stage: str, elapsed_ms: float) -> None:
        """Count one measurement of `stage`."""
        self._recent_ms.setdefault(stage, deque(maxlen=_WINDOW)).append(elapsed_ms)
        self._count[stage] = self._count.get(stage, 0) + 1
        self._total_ms[stage] = self._total_ms.get(stage, 0.0) + elapsed_ms

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Count the time of the block, unless it raises."""
        start_ns = time.perf_counter_ns()
        yield
        self.add(stage, (time.perf_counter_ns() - start_ns) / 1e6)

    def summary(self) -> dict[str, StageSummary]:
        """The figures of every stage that was measured."""
        return {stage: self._summarise(stage) for stage in self._count}

    def _summarise(self, stage: str) -> StageSummary:
        p50_ms, p95_ms = np.percentile(self._recent_ms[stage], (50, 95))
        return StageSummary(
            count=self._count[stage],
            total_ms=self._total_ms[stage],
            p50_ms=float(p50_ms),
            p95_ms=float(p95_ms),
        )
