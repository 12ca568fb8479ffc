"""A server is alive while it answers, and ready while every session it has shows what it should."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from scope_runners.serve.session_states import SessionState

_SHOWING = (SessionState.LIVE, SessionState.PAUSED, SessionState.DEGRADED)


class ViewedSession(Protocol):
    """A session, as far as it is judged."""

    def view(self) -> Mapping[str, Any]:
        """The session as JSON has it, its `stats` included."""


def reasons_against(view: Mapping[str, Any]) -> list[str]:
    """Why this session is not ready, a sentence each; none for one that ended in order."""
    if view["state"] == SessionState.STOPPED:
        return []
    reasons = []
    if view["state"] not in _SHOWING:
        reasons.append(f"it is {view['state']}: {view['detail']}")
    gone = [str(each["rank"]) for each in view["ranks"] if each["state"] != "running"]
    if view["world_size"] is None:
        reasons.append("its ranks have not met")
    elif gone:
        reasons.append(f"rank {', '.join(gone)} of {view['world_size']} does not run")
    if view["chunk_index"] is None or view["chunk_index"] < 0:
        reasons.append("it has made no chunk yet")
    if view["stats"]["parity"] == "bad":
        reasons.append("a chunk that was shown was found wrong; see runbooks/drift.md")
    return reasons


def health_router(sessions: Callable[[], Iterable[ViewedSession]]) -> APIRouter:
    """`GET /healthz`: 200 while the process answers. `GET /readyz`: 200, or 503 with the reasons.

    A server without a session is ready: it can take one.
    """
    router = APIRouter()

    @router.get("/healthz")
    async def alive() -> dict[str, str]:
        return {"status": "alive"}

    @router.get("/readyz", responses={503: {"description": "A session is not ready; why is said"}})
    def ready() -> JSONResponse:
        judged = [(view["id"], reasons_against(view)) for view in (s.view() for s in sessions())]
        is_ready = not any(reasons for _, reasons in judged)
        return JSONResponse(
            {
                "ready": is_ready,
                "sessions": [
                    {"id": name, "ready": not reasons, "reasons": reasons}
                    for name, reasons in judged
                ],
            },
            200 if is_ready else 503,
        )

    return router
