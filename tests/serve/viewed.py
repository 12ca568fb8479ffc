"""Sessions that say what the server's API tells of them; not a test itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scope_runners.serve.histogram import Histogram, HistogramCounts


def stats(**changes: Any) -> dict[str, Any]:
    """Those of a session that has shown 41 chunks."""
    return {
        "stage_ms": {"generate": {"p50": 180.0, "p95": 210.0}},
        "prompt_latency_ms": {"p50": 700.0, "p95": 900.0, "last": 650.0, "n": 3},
        "cache_fill": 1.0,
        "cache_bytes": 3 * 2**20,
        "cache_epoch": 2,
        "recoveries": 1,
        "retracted_chunks": 0,
        "parity": "good",
        "deadline_attainment": 0.975,
        "chunks": 41,
        "frames": 492,
        "frames_per_s": 16.0,
        "stalls": 2,
        "lead_s": 0.4,
        "drops": {"slow_viewer": 7, "hard_cut": 12},
        "encode_ms": {"p50": 2.0, "p95": 4.0},
        "publications": [{"state": "live"}, {"state": "retrying"}, {"state": "live"}],
    } | changes


def view(**changes: Any) -> dict[str, Any]:
    """That of a session that is live."""
    return {
        "id": "4f0c",
        "state": "live",
        "detail": "live",
        "prompt": "a secret prompt",
        "fps": 16,
        "plan": "pp1",
        "tp": 1,
        "world_size": 2,
        "chunk_index": 40,
        "cache_epoch": 2,
        "media_time_s": 30.75,
        "lead_s": 0.4,
        "ranks": [
            {"rank": 0, "state": "running", "pid": 10},
            {"rank": 1, "state": "running", "pid": 11},
        ],
        "stats": stats(),
        "viewers": 3,
        "recording": None,
    } | changes


NOT_READY_YET: Mapping[str, Any] = {
    "state": "starting",
    "detail": "its ranks start",
    "fps": None,
    "plan": None,
    "tp": None,
    "world_size": None,
    "chunk_index": -1,
    "cache_epoch": -1,
    "ranks": [],
}
"""What a session lacks before its ranks have met."""


@dataclass
class ViewedSession:
    """Says a view, and has measured two chunks and a command."""

    said: dict[str, Any] = field(default_factory=view)

    def view(self) -> Mapping[str, Any]:
        return self.said

    def stage_histograms(self) -> Mapping[str, HistogramCounts]:
        generate = Histogram()
        generate.observe(0.18)
        generate.observe(0.3)
        return {"generate": generate.counts()}

    def latency_histogram(self) -> HistogramCounts:
        latency = Histogram()
        latency.observe(0.7)
        return latency.counts()
