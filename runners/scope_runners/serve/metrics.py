"""What Prometheus reads is what the sessions say at that moment: nothing is counted a second time.

A session that is deleted takes its series along, and no label holds a prompt or any other text of a
user. Names, labels and meanings are in `runbooks/guides/serving.md`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import APIRouter, Response
from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from scope_runners.serve.histogram import BOUNDS_S, HistogramCounts
from scope_runners.serve.session_states import SessionState

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MeasuredSession(Protocol):
    """A session, as far as it is measured."""

    def view(self) -> Mapping[str, Any]:
        """The session as JSON has it, its `stats` included."""

    def stage_histograms(self) -> Mapping[str, HistogramCounts]:
        """Seconds a chunk spent in each stage, over all chunks since this server started."""

    def latency_histogram(self) -> HistogramCounts:
        """Seconds from a command's post to its first picture."""


@dataclass(frozen=True, slots=True)
class _Figure:
    """A metric with one value a session; `read` takes a session's view."""

    name: str
    help: str
    read: Callable[[Mapping[str, Any]], float | None]
    """None where there is no value yet: the series is left out, since 0 would be a claim."""


def _stat(name: str) -> Callable[[Mapping[str, Any]], float | None]:
    return lambda view: view["stats"][name]


_COUNTERS = (
    _Figure("scope_chunks", "Chunks that came from rank0.", _stat("chunks")),
    _Figure("scope_frames", "Frames that came from rank0.", _stat("frames")),
    _Figure("scope_stalls", "Frames that were due and not there.", _stat("stalls")),
    _Figure("scope_recoveries", "Times the ranks started again.", _stat("recoveries")),
    _Figure(
        "scope_retracted_chunks",
        "Chunks found wrong after they were shown: a parity failure.",
        _stat("retracted_chunks"),
    ),
)

_GAUGES = (
    _Figure("scope_frames_per_second", "Frames shown a second, of late.", _stat("frames_per_s")),
    _Figure("scope_target_frames_per_second", "The stream's own rate.", lambda view: view["fps"]),
    _Figure("scope_viewers", "Viewers of all kinds.", lambda view: view["viewers"]),
    _Figure("scope_cache_epoch", "Rises with each hard cut.", _stat("cache_epoch")),
    _Figure("scope_cache_bytes", "A generator rank's cache.", _stat("cache_bytes")),
    _Figure("scope_cache_fill_ratio", "Of the attention window, 0 to 1.", _stat("cache_fill")),
    _Figure("scope_lead_seconds", "Frames that wait to be shown.", lambda view: view["lead_s"]),
    _Figure("scope_media_seconds", "How far the stream is.", lambda view: view["media_time_s"]),
    _Figure(
        "scope_deadline_attainment_ratio",
        "Chunks that came before their first frame was due, 0 to 1.",
        _stat("deadline_attainment"),
    ),
    _Figure(
        "scope_recording", "1 while it is recorded.", lambda view: float(bool(view["recording"]))
    ),
)
_PARITY = ("good", "bad", "unknown")


class SessionCollector:
    """Turns views of sessions into metric families; `collect` may be called from any thread."""

    def __init__(self, sessions: Callable[[], Iterable[MeasuredSession]]) -> None:
        self._sessions = sessions

    def collect(self) -> Iterator[Metric]:
        """One family a metric, each with all sessions."""
        sessions = [(each.view(), each) for each in self._sessions()]
        views = [view for view, _ in sessions]
        yield from _of_states(views)
        yield from _of_figures(views)
        yield from _of_ranks_and_drops(views)
        yield from _of_encoding(views)
        yield from _of_publications(views)
        yield from _of_times(sessions)


class ServerMetrics:
    """The server's own registry: nothing that another library registers is shown."""

    def __init__(self, sessions: Callable[[], Iterable[MeasuredSession]]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(SessionCollector(sessions))
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def text(self) -> bytes:
        """In Prometheus's text format."""
        answer: bytes = generate_latest(self.registry)
        return answer


def metrics_router(metrics: ServerMetrics) -> APIRouter:
    """`GET /metrics`; in a worker thread, since views take the sessions' locks."""
    router = APIRouter()

    @router.get("/metrics", include_in_schema=False)
    def read() -> Response:
        return Response(metrics.text(), media_type=_CONTENT_TYPE)

    return router


def _of_states(views: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
    total = GaugeMetricFamily("scope_sessions", "Sessions, by state.", labels=["state"])
    state = GaugeMetricFamily(
        "scope_session_state", "1 for the state it is in.", labels=["session", "state"]
    )
    info = GaugeMetricFamily(
        "scope_session_info", "1; the labels say what it is.", labels=["session", "plan", "tp"]
    )
    parity = GaugeMetricFamily(
        "scope_parity", "1 for what the integrity checks say.", labels=["session", "parity"]
    )
    views = list(views)
    for each in SessionState:
        total.add_metric([each], sum(view["state"] == each for view in views))
    for view in views:
        for each in SessionState:
            state.add_metric([view["id"], each], float(view["state"] == each))
        for said in _PARITY:
            parity.add_metric([view["id"], said], float(view["stats"]["parity"] == said))
        if view["plan"] is not None:
            info.add_metric([view["id"], str(view["plan"]), str(view["tp"])], 1.0)
    yield from (total, state, info, parity)


def _of_figures(views: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
    views = list(views)
    for kind, figures in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
        for figure in figures:
            family = kind(figure.name, figure.help, labels=["session"])
            for view in views:
                value = figure.read(view)
                if value is not None:
                    family.add_metric([view["id"]], float(value))
            yield family


def _of_ranks_and_drops(views: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
    ranks = GaugeMetricFamily("scope_rank_up", "1 while it runs.", labels=["session", "rank"])
    drops = CounterMetricFamily(
        "scope_frames_dropped", "Frames not shown, by cause.", labels=["session", "cause"]
    )
    for view in views:
        for rank in view["ranks"]:
            ranks.add_metric([view["id"], str(rank["rank"])], float(rank["state"] == "running"))
        for cause, count in view["stats"]["drops"].items():
            drops.add_metric([view["id"], cause], count)
    yield from (ranks, drops)


def _of_encoding(views: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
    encode = GaugeMetricFamily(
        "scope_encode_seconds", "Of a frame, of late.", labels=["session", "quantile"]
    )
    for view in views:
        of_late = view["stats"].get("encode_ms") or {}  # there from the first viewer on
        for name, quantile in (("p50", "0.5"), ("p95", "0.95")):
            if of_late.get(name) is not None:
                encode.add_metric([view["id"], quantile], of_late[name] / 1000)
    yield encode


def _of_publications(views: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
    publications = GaugeMetricFamily(
        "scope_publications", "To media servers, by state.", labels=["session", "state"]
    )
    for view in views:
        states = Counter(each["state"] for each in view["stats"]["publications"])
        for state, count in states.items():
            publications.add_metric([view["id"], state], count)
    yield publications


def _of_times(
    sessions: Iterable[tuple[Mapping[str, Any], MeasuredSession]],
) -> Iterator[Metric]:
    stages = HistogramMetricFamily(
        "scope_stage_seconds", "A chunk in each stage.", labels=["session", "stage"]
    )
    latency = HistogramMetricFamily(
        "scope_prompt_latency_seconds", "From a post to its first picture.", labels=["session"]
    )
    for view, session in sessions:
        for stage, counts in session.stage_histograms().items():
            stages.add_metric([view["id"], stage], _buckets(counts), counts.sum_s)
        counts = session.latency_histogram()
        latency.add_metric([view["id"]], _buckets(counts), counts.sum_s)
    yield from (stages, latency)


def _buckets(counts: HistogramCounts) -> list[tuple[str, float]]:
    bounds = [*(str(bound) for bound in BOUNDS_S), "+Inf"]
    return list(zip(bounds, [*counts.cumulative, counts.count], strict=True))
