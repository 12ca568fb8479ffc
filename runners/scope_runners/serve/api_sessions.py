"""Sessions over HTTP: started, listed, forked, ended."""

import base64
from typing import Any

from fastapi import FastAPI, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from scope_contracts.errors import UserInputError
from scope_runners.serve.api_state import Api
from scope_runners.serve.asked_settings import check_asked
from scope_runners.serve.commands import MOST_PROMPT


class NewSession(BaseModel):
    """A stream to start."""

    model_config = ConfigDict(extra="forbid")

    prompt: str = Field(min_length=1, max_length=MOST_PROMPT)
    config: dict[str, str | int | float | bool | None] = Field(
        default_factory=dict, description="settings of StreamConfig by name, such as plan and seed"
    )
    lease_s: float | None = Field(None, ge=0, le=1e9, description="0 is for ever")
    image: str = Field(
        "", description="base64 of a picture that the stream begins with, for models that take one"
    )


class Fork(BaseModel):
    """A stream that continues a copy of another one."""

    model_config = ConfigDict(extra="forbid")

    chunk_index: int = Field(ge=0, le=2**31)
    prompt: str | None = Field(None, min_length=1, max_length=MOST_PROMPT)


def _picture(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise UserInputError(f"image: is no base64 ({error}); encode the file's bytes") from error


def add_sessions(app: FastAPI, api: Api) -> None:
    @app.post("/v1/sessions", status_code=201)
    async def create(asked: NewSession) -> dict[str, Any]:
        settings = {name: value for name, value in asked.config.items() if value is not None}
        check_asked(settings, api.sessions.settings)
        session = await run_in_threadpool(
            api.sessions.create,
            asked.prompt,
            settings,
            lease_s=asked.lease_s,
            image=_picture(asked.image),
        )
        return await run_in_threadpool(session.view)

    @app.get("/v1/sessions")
    def listed() -> list[dict[str, Any]]:
        return [each.view() for each in api.sessions.all()]

    @app.get("/v1/limits")
    def limits() -> dict[str, Any]:
        return {
            "max_sessions": api.sessions.settings.max_sessions,
            "no_more_sessions": api.sessions.why_no_more(),
        }

    @app.get("/v1/sessions/{session_id}")
    def shown(session_id: str) -> dict[str, Any]:
        return api.session(session_id).view()

    @app.delete("/v1/sessions/{session_id}", status_code=204)
    async def deleted(session_id: str) -> Response:
        api.session(session_id)
        if session_id in api.peers:
            await api.peers.pop(session_id).close_all()
        await run_in_threadpool(api.sessions.delete, session_id)
        return Response(status_code=204)

    @app.post("/v1/sessions/{session_id}/lease")
    async def renewed(session_id: str) -> dict[str, float]:
        return {"lease_s": api.session(session_id).record.lease_s}

    @app.post("/v1/sessions/{session_id}/fork", status_code=201)
    async def forked(session_id: str, asked: Fork) -> dict[str, Any]:
        parent = api.session(session_id)
        fork = await run_in_threadpool(api.sessions.fork, parent, asked.chunk_index, asked.prompt)
        return await run_in_threadpool(fork.view)
