"""What a session measures of itself, over the chunks and seconds of late."""

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from scope_runners.serve.histogram import Histogram, HistogramCounts

_NUM_CHUNKS = 128
_NUM_LATENCIES = 512
_RATE_OVER_S = 4.0


@dataclass(slots=True, kw_only=True)
class Measurements:
    """Any thread may note; times in seconds of one clock unless they are named otherwise."""

    num_chunks: int = 0
    num_frames: int = 0
    num_recoveries: int = 0
    num_retracted: int = 0
    is_wrong: bool = False
    """Whether chunks were retracted and none was made in their place yet."""
    num_late: int = 0
    """Chunks that came when their first frame was due already."""
    cache_epoch: int = -1
    cache_fill: float = 0.0
    stage_ms: dict[str, deque[float]] = field(default_factory=dict)
    newest_ms: dict[str, float] = field(default_factory=dict)
    """The stages of the chunk that came last."""
    latency_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_LATENCIES))
    _stages: dict[str, Histogram] = field(default_factory=dict)
    _latency: Histogram = field(default_factory=Histogram)
    _shown_s: deque[float] = field(default_factory=lambda: deque(maxlen=4096))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def chunk(
        self,
        stage_ms: Iterable[tuple[str, float]],
        *,
        num_frames: int,
        cache_epoch: int,
        cache_fill: float,
        is_late: bool,
    ) -> None:
        """A chunk has come."""
        with self._lock:
            self.num_chunks += 1
            self.is_wrong = False
            self.num_frames += num_frames
            self.num_late += is_late
            self.cache_epoch, self.cache_fill = cache_epoch, cache_fill
            newest = dict(stage_ms)
            self.newest_ms = newest
            for stage, ms in newest.items():
                self.stage_ms.setdefault(stage, deque(maxlen=_NUM_CHUNKS)).append(ms)
                self._stages.setdefault(stage, Histogram()).observe(ms / 1e3)

    def frame(self, now_s: float) -> None:
        """A frame was shown."""
        with self._lock:
            self._shown_s.append(now_s)

    def latency(self, ms: float) -> None:
        """A command was on screen so long after its post."""
        with self._lock:
            self.latency_ms.append(ms)
            self._latency.observe(ms / 1e3)

    def frames_per_s(self, now_s: float) -> float:
        """Shown of late."""
        with self._lock:
            recent = [each for each in self._shown_s if each > now_s - _RATE_OVER_S]
        return len(recent) / _RATE_OVER_S

    def stage_histograms(self) -> dict[str, HistogramCounts]:
        """Seconds that chunks spent in each stage, since this was made."""
        with self._lock:
            return {stage: histogram.counts() for stage, histogram in self._stages.items()}

    def latency_histogram(self) -> HistogramCounts:
        """Seconds from a command's post to its first picture, since this was made."""
        with self._lock:
            return self._latency.counts()

    def told(self) -> dict[str, Any]:
        """As JSON has it."""
        with self._lock:
            latencies = list(self.latency_ms)
            attained = 1.0 - self.num_late / self.num_chunks if self.num_chunks else 1.0
            return {
                "stage_ms": {name: quantiles(ms) for name, ms in self.stage_ms.items()},
                "prompt_latency_ms": {
                    **quantiles(latencies),
                    "last": latencies[-1] if latencies else None,
                    "n": len(latencies),
                },
                "cache_fill": self.cache_fill,
                "cache_epoch": self.cache_epoch,
                "recoveries": self.num_recoveries,
                "retracted_chunks": self.num_retracted,
                "parity": "bad" if self.is_wrong else "good" if self.num_chunks else "unknown",
                "deadline_attainment": attained,
                "newest_ms": dict(self.newest_ms),
                "chunks": self.num_chunks,
                "frames": self.num_frames,
            }


def quantiles(values: Iterable[float]) -> dict[str, float | None]:
    """`p50` and `p95`, by the nearest rank."""
    ordered = sorted(values)
    if not ordered:
        return {"p50": None, "p95": None}
    last = len(ordered) - 1
    return {"p50": ordered[round(last * 0.5)], "p95": ordered[round(last * 0.95)]}
