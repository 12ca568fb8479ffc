"""Prometheus reads what the sessions say, under the names that the guide has."""

import re
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")
pytest.importorskip("fastapi")

from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from scope_runners.serve.bounded_http import HEAD_S
from scope_runners.serve.commands import MOST_PROMPT
from scope_runners.serve.histogram import BOUNDS_S, Histogram
from scope_runners.serve.metrics import ServerMetrics, metrics_router
from scope_runners.serve.request_body import BODY_S
from scope_runners.serve.sessions import MOST_ENDED
from scope_runners.serve.settings import ServeSettings
from tests.serve.viewed import NOT_READY_YET, ViewedSession, stats, view

GUIDE = Path(__file__).parents[2] / "runbooks" / "guides" / "serving.md"
Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def read(*sessions: ViewedSession) -> Values:
    app = FastAPI()
    app.include_router(metrics_router(ServerMetrics(lambda: sessions)))
    answer = TestClient(app).get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def of(values: Values, name: str, **labels: str) -> float:
    return values[name, tuple(sorted(labels.items()))]


def test_every_figure_of_a_session_is_told_with_its_id() -> None:
    values = read(ViewedSession(), ViewedSession(view(id="9a", stats=stats(frames=7))))
    assert of(values, "scope_frames_total", session="4f0c") == 492
    assert of(values, "scope_frames_total", session="9a") == 7
    assert of(values, "scope_frames_dropped_total", session="4f0c", cause="slow_viewer") == 7
    assert of(values, "scope_frames_dropped_total", session="4f0c", cause="hard_cut") == 12
    assert of(values, "scope_viewers", session="4f0c") == 3
    assert of(values, "scope_cache_bytes", session="4f0c") == 3 * 2**20
    assert of(values, "scope_encode_seconds", session="4f0c", quantile="0.95") == 0.004
    assert of(values, "scope_publications", session="4f0c", state="live") == 2
    assert of(values, "scope_publications", session="4f0c", state="retrying") == 1
    assert of(values, "scope_sessions", state="live") == 2
    assert of(values, "scope_sessions", state="failed") == 0
    assert of(values, "scope_session_info", session="4f0c", plan="pp1", tp="1") == 1


def test_a_histogram_counts_what_is_at_most_its_bound() -> None:
    values = read(ViewedSession())
    name, told = "scope_stage_seconds_bucket", {"session": "4f0c", "stage": "generate"}
    assert of(values, name, le="0.1", **told) == 0
    assert of(values, name, le="0.2", **told) == 1
    assert of(values, name, le="0.5", **told) == 2
    assert of(values, name, le="+Inf", **told) == 2
    assert of(values, "scope_stage_seconds_sum", **told) == pytest.approx(0.48)
    assert of(values, "scope_prompt_latency_seconds_count", session="4f0c") == 1


def test_a_value_that_equals_a_bound_belongs_below_it() -> None:
    histogram = Histogram()
    for bound in BOUNDS_S:
        histogram.observe(bound)
    histogram.observe(BOUNDS_S[-1] * 2)
    counts = histogram.counts()
    assert counts.cumulative == tuple(range(1, len(BOUNDS_S) + 1))
    assert counts.count == len(BOUNDS_S) + 1


def test_a_session_whose_ranks_have_not_met_has_no_figure_that_it_cannot_know() -> None:
    values = read(ViewedSession(view(**NOT_READY_YET)))
    assert ("scope_target_frames_per_second", (("session", "4f0c"),)) not in values
    assert not [name for name, _ in values if name == "scope_session_info"]
    assert of(values, "scope_session_state", session="4f0c", state="starting") == 1


def test_a_lost_rank_and_a_retraction_are_told() -> None:
    ranks = [{"rank": 0, "state": "running", "pid": 1}, {"rank": 1, "state": "lost", "pid": 2}]
    wrong = stats(parity="bad", retracted_chunks=4)
    values = read(ViewedSession(view(ranks=ranks, stats=wrong)))
    assert of(values, "scope_rank_up", session="4f0c", rank="0") == 1
    assert of(values, "scope_rank_up", session="4f0c", rank="1") == 0
    assert of(values, "scope_parity", session="4f0c", parity="bad") == 1
    assert of(values, "scope_parity", session="4f0c", parity="good") == 0
    assert of(values, "scope_retracted_chunks_total", session="4f0c") == 4


def test_no_text_of_a_user_is_a_label() -> None:
    assert "secret" not in ServerMetrics(lambda: [ViewedSession()]).text().decode()


def test_a_deleted_session_takes_its_series_along() -> None:
    sessions = [ViewedSession()]
    metrics = ServerMetrics(lambda: sessions)
    assert b"4f0c" in metrics.text()
    sessions.clear()
    assert b"4f0c" not in metrics.text()


def test_the_guide_lists_the_limits_that_hold() -> None:
    rows = re.findall(r"^\| ([^|`]+) \| ([^|]+) \| [^|]*\|$", GUIDE.read_text(), re.M)
    figures = {name: re.findall(r"\d[\d,]*\b", said) for name, said in rows}
    settings = ServeSettings()
    limits = {
        "sessions": [str(settings.max_sessions)],
        "sessions that have ended and were not deleted": [str(MOST_ENDED)],
        "viewers of a session": [str(settings.max_viewers)],
        "ranks of a session that a client asks for": [str(settings.max_ranks)],
        "pixels of a picture that a client asks for": [f"{settings.max_pixels:,}"],
        "lead of generation over what is shown": [f"{settings.pace.lead_chunks:g}"],
        "requests of one client": [f"{settings.requests_per_s:g}"],
        "a request's body": [str(settings.max_body_bytes // 2**20), f"{BODY_S:g}"],
        "a request's head": [f"{HEAD_S:g}"],
        "a prompt": [f"{MOST_PROMPT:,}"],
        "ranks without a server": [f"{settings.orphan_s:g}"],
    }
    assert {name: figures.get(name) for name in limits} == limits


def test_the_guide_lists_every_metric_and_no_other() -> None:
    families = text_string_to_metric_families(
        ServerMetrics(lambda: [ViewedSession()]).text().decode()
    )
    ours = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in families
        if family.name.startswith("scope_")
    }
    documented = re.findall(r"^\| `(scope_\w+)`", GUIDE.read_text(), re.M)
    assert sorted(documented) == sorted(ours)
