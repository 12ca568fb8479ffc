"""The HTTP face of the server: what computes is elsewhere, what blocks is off the event loop."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from scope_contracts.errors import ScopeError, UserInputError
from scope_rt.version import __version__
from scope_runners.serve.api_commands import add_commands
from scope_runners.serve.api_input import add_input
from scope_runners.serve.api_publish import add_publications
from scope_runners.serve.api_sessions import add_sessions
from scope_runners.serve.api_state import Api, first_wrong
from scope_runners.serve.api_streams import add_streams
from scope_runners.serve.health import health_router
from scope_runners.serve.journal import JournalError
from scope_runners.serve.media.hub import TooManyViewersError
from scope_runners.serve.metrics import ServerMetrics, metrics_router
from scope_runners.serve.sessions import NotMadeError, Sessions, TooManySessionsError

_PROBLEMS = {
    400: "The request cannot be read",
    401: "It lacks the token",
    403: "Its host or origin is not the server's",
    404: "There is no such session, command, viewer or recording",
    409: "Nothing is shown yet",
    413: "Its body is too large",
    422: "A value cannot be used",
    429: "Its client asks too often",
    503: "The server has as many sessions or viewers as it may, or its disk is full",
}
_FOR_NOW = (TooManySessionsError, TooManyViewersError, NotMadeError, JournalError)
"""What can be asked again, once something has ended or was freed."""
_PAGE = Path(__file__).with_name("page")


class Problem(BaseModel):
    """Why a request is refused."""

    detail: str = Field(description="one sentence that names what to change")


def create_app(sessions: Sessions, *, on_end: Callable[[], None] = lambda: None) -> FastAPI:
    """The application; at its end all sessions are ended in order, then `on_end` is called."""
    api = Api(sessions)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        for peers in api.peers.values():
            await peers.close_all()
        await run_in_threadpool(sessions.close)
        on_end()

    app = FastAPI(
        title="scope-rt",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # pages that load scripts of others
        redoc_url=None,
        responses={code: {"model": Problem, "description": why} for code, why in _PROBLEMS.items()},
    )

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse({"detail": first_wrong(error.errors())}, 422)

    @app.exception_handler(ScopeError)
    async def refused(request: Request, error: ScopeError) -> JSONResponse:
        code = (
            503
            if isinstance(error, _FOR_NOW)
            else 422
            if isinstance(error, UserInputError)
            else 500
        )
        return JSONResponse({"detail": str(error)}, code)

    add_sessions(app, api)
    add_commands(app, api)
    add_streams(app, api)
    add_input(app, api)
    add_publications(app, api)
    app.include_router(health_router(sessions.all))
    app.include_router(metrics_router(ServerMetrics(sessions.all)))
    app.mount("/static", StaticFiles(directory=_PAGE), name="static")

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(_PAGE / "index.html")

    return app
