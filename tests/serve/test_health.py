"""A load balancer is told that a server is not ready, and a person why."""

from typing import Any

import pytest

pytest.importorskip("fastapi")

from fastapi import FastAPI
from fastapi.testclient import TestClient

from scope_runners.serve.health import health_router
from tests.serve.viewed import NOT_READY_YET, ViewedSession, stats, view

LOST = [{"rank": 0, "state": "running", "pid": 1}, {"rank": 1, "state": "lost", "pid": 2}]


def client(*views: dict[str, Any]) -> TestClient:
    app = FastAPI()
    app.include_router(health_router(lambda: [ViewedSession(each) for each in views]))
    return TestClient(app)


def test_a_server_is_alive_whatever_its_sessions_do() -> None:
    answer = client(view(state="failed", detail="its ranks ended with 1")).get("/healthz")
    assert (answer.status_code, answer.json()) == (200, {"status": "alive"})


@pytest.mark.parametrize("state", ["live", "paused", "degraded"])
def test_a_session_that_shows_is_ready(state: str) -> None:
    answer = client(view(state=state)).get("/readyz")
    assert answer.status_code == 200
    assert answer.json() == {
        "ready": True,
        "sessions": [{"id": "4f0c", "ready": True, "reasons": []}],
    }


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        (
            NOT_READY_YET,
            [
                "it is starting: its ranks start",
                "its ranks have not met",
                "it has made no chunk yet",
            ],
        ),
        ({"chunk_index": -1}, ["it has made no chunk yet"]),
        ({"ranks": LOST}, ["rank 1 of 2 does not run"]),
        (
            {"state": "recovering", "detail": "rank 1 was ended by SIGKILL"},
            ["it is recovering: rank 1 was ended by SIGKILL"],
        ),
        ({"state": "failed", "detail": "the disk is full"}, ["it is failed: the disk is full"]),
        (
            {"stats": stats(parity="bad")},
            ["a chunk that was shown was found wrong; see runbooks/drift.md"],
        ),
    ],
)
def test_a_session_that_is_not_ready_says_why(changes: dict[str, Any], reasons: list[str]) -> None:
    answer = client(view(id="9a"), view(**changes)).get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["ready"] is False
    well, ill = answer.json()["sessions"]
    assert well == {"id": "9a", "ready": True, "reasons": []}
    assert ill == {"id": "4f0c", "ready": False, "reasons": reasons}


def test_a_server_without_a_session_or_with_one_that_ended_in_order_is_ready() -> None:
    assert client().get("/readyz").status_code == 200
    assert client(view(state="stopped", ranks=LOST)).get("/readyz").status_code == 200
