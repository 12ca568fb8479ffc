"""Where a session is published, over HTTP."""

from typing import Any

from fastapi import FastAPI, HTTPException, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from scope_runners.serve.api_state import Api


class NewPublication(BaseModel):
    """A media server that is to get the stream."""

    model_config = ConfigDict(extra="forbid")

    url: str = Field(
        min_length=1,
        max_length=2048,
        description="rtmp(s)://, srt:// or rtsp://, or the http(s):// of a WHIP endpoint, with its "
        "bearer token as #token=TOKEN",
    )


def add_publications(app: FastAPI, api: Api) -> None:
    """Add the routes."""

    @app.post("/v1/sessions/{session_id}/publications", status_code=201)
    async def published(session_id: str, asked: NewPublication) -> dict[str, Any]:
        publications = api.session(session_id).stage.publications
        return await run_in_threadpool(publications.begin, asked.url)

    @app.get("/v1/sessions/{session_id}/publications")
    async def publications(session_id: str) -> list[dict[str, Any]]:
        return api.session(session_id).stage.publications.told

    @app.delete("/v1/sessions/{session_id}/publications/{publication}", status_code=204)
    async def ended(session_id: str, publication: str) -> Response:
        session = api.session(session_id)
        if not await run_in_threadpool(session.stage.publications.end, publication):
            raise HTTPException(404, f"there is no publication {publication[:64]!r}")
        return Response(status_code=204)
