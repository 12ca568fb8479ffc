"""The HTTP face of the server: sessions, commands, events and streams. What computes is elsewhere;
what may block is off the event loop."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Query, Request, Response, WebSocket
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.websockets import WebSocketDisconnect

from scope_contracts.errors import ScopeError, UserInputError
from scope_rt.version import __version__
from scope_runners.serve.asked_settings import check_asked
from scope_runners.serve.commands import MOST_PROMPT, AnyCommand, posted
from scope_runners.serve.health import health_router
from scope_runners.serve.media import mjpeg
from scope_runners.serve.media.encoder import Codec
from scope_runners.serve.media.hub import MediaHub, TooManyViewersError
from scope_runners.serve.media.recording import recording_file
from scope_runners.serve.media.webrtc import Peers
from scope_runners.serve.metrics import ServerMetrics, metrics_router
from scope_runners.serve.rates import Rate
from scope_runners.serve.receipts import Receipt
from scope_runners.serve.session import LiveSession
from scope_runners.serve.sessions import Sessions, TooManySessionsError

_MOST_WAIT_S = 60.0
_LOOK_S = 0.02
_MOST_WAITING = 64
"""Requests that wait for a command's answer; those beyond are told that it is pending."""
_PROBLEMS = {
    400: "The request cannot be read",
    401: "It lacks the token",
    403: "Its host or origin is not the server's",
    404: "There is no such session, command, viewer or recording",
    409: "Nothing is shown yet",
    413: "Its body is too large",
    422: "A value cannot be used",
    429: "Its client asks too often",
    503: "The server has as many sessions or viewers as it may",
}
_PAGE = Path(__file__).with_name("page")
_COMMANDS: TypeAdapter[Any] = TypeAdapter(AnyCommand)


class NewSession(BaseModel):
    """A stream to start."""

    model_config = ConfigDict(extra="forbid")

    prompt: str = Field(min_length=1, max_length=MOST_PROMPT)
    config: dict[str, str | int | float | bool | None] = Field(
        default_factory=dict, description="settings of StreamConfig by name, such as plan and seed"
    )
    lease_s: float | None = Field(None, ge=0, le=1e9, description="0 is for ever")


class Fork(BaseModel):
    """A stream that continues a copy of another one."""

    model_config = ConfigDict(extra="forbid")

    chunk_index: int = Field(ge=0, le=2**31)
    prompt: str | None = Field(None, min_length=1, max_length=MOST_PROMPT)


class Problem(BaseModel):
    """Why a request is refused."""

    detail: str = Field(description="one sentence that names what to change")


class Api:
    """The routes, over the sessions of one server."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions
        self.peers: dict[str, Peers] = {}
        self._num_waiting = 0

    def session(self, session_id: str) -> LiveSession:
        """Raises a 404."""
        session = self.sessions.get(session_id)
        if session is None:
            raise HTTPException(404, f"there is no session {session_id[:64]!r}; list /v1/sessions")
        return session

    def hub(self, session_id: str) -> MediaHub:
        """Raises a 404, or a 409 where nothing is shown yet."""
        hub = self.session(session_id).hub
        if hub is None:
            raise HTTPException(409, "nothing is shown yet; try again once the session is live")
        return hub

    def peers_of(self, session_id: str) -> Peers:
        """The WebRTC viewers of a session."""
        if session_id not in self.peers:
            self.peers[session_id] = Peers(self.sessions.settings.ice_servers)
        return self.peers[session_id]

    async def post(self, session: LiveSession, command: Any, wait_s: float) -> Receipt:
        """Post a command and wait for its answer, `wait_s` at most."""
        kind, fields, command_id, in_chunks = posted(command)
        receipt = await run_in_threadpool(
            session.post, kind, fields, command_id=command_id, in_chunks=in_chunks
        )
        if receipt.at_chunk >= 0 or self._num_waiting >= _MOST_WAITING:
            return receipt
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_s
        self._num_waiting += 1
        try:
            while receipt.is_open and loop.time() < deadline_s:
                await asyncio.sleep(_LOOK_S)
                receipt = session.receipts.get(receipt.id) or receipt
        finally:
            self._num_waiting -= 1
        return receipt


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
        return JSONResponse({"detail": _first_wrong(error.errors())}, 422)

    @app.exception_handler(ScopeError)
    async def refused(request: Request, error: ScopeError) -> JSONResponse:
        busy = isinstance(error, TooManySessionsError | TooManyViewersError)
        code = 503 if busy else 422 if isinstance(error, UserInputError) else 500
        return JSONResponse({"detail": str(error)}, code)

    _add_sessions(app, api)
    _add_commands(app, api)
    _add_streams(app, api)
    app.include_router(health_router(sessions.all))
    app.include_router(metrics_router(ServerMetrics(sessions.all)))
    app.mount("/static", StaticFiles(directory=_PAGE), name="static")

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(_PAGE / "index.html")

    return app


def _first_wrong(errors: Sequence[Any]) -> str:
    """Without what was given: it may be a secret, or no text."""
    first = errors[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    return f"{where or 'request'}: {first['msg']}"


def _add_sessions(app: FastAPI, api: Api) -> None:
    @app.post("/v1/sessions", status_code=201)
    async def create(asked: NewSession) -> dict[str, Any]:
        settings = {name: value for name, value in asked.config.items() if value is not None}
        check_asked(settings, api.sessions.settings)
        session = await run_in_threadpool(
            api.sessions.create, asked.prompt, settings, lease_s=asked.lease_s
        )
        return session.view()

    @app.get("/v1/sessions")
    async def listed() -> list[dict[str, Any]]:
        return [each.view() for each in api.sessions.all()]

    @app.get("/v1/sessions/{session_id}")
    async def shown(session_id: str) -> dict[str, Any]:
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
        return fork.view()


def _add_commands(app: FastAPI, api: Api) -> None:
    @app.post("/v1/sessions/{session_id}/commands")
    async def post(
        session_id: str, command: AnyCommand, wait_s: float = Query(10.0, ge=0, le=_MOST_WAIT_S)
    ) -> dict[str, Any]:
        session = api.session(session_id)
        return (await api.post(session, command, wait_s)).to_plain()

    @app.get("/v1/sessions/{session_id}/commands")
    async def receipts(session_id: str) -> list[dict[str, Any]]:
        return [each.to_plain() for each in api.session(session_id).receipts.all()]

    @app.get("/v1/sessions/{session_id}/commands/{command_id}")
    async def receipt(session_id: str, command_id: str) -> dict[str, Any]:
        found = api.session(session_id).receipts.get(command_id)
        if found is None:
            raise HTTPException(404, f"there is no command {command_id[:64]!r}")
        return found.to_plain()

    @app.websocket("/v1/sessions/{session_id}/events")
    async def events(socket: WebSocket, session_id: str, after: int = 0) -> None:
        session = api.sessions.get(session_id)
        await socket.accept()
        if session is None:
            await socket.close(4404, "there is no such session")
            return
        if session.events.num_listeners >= 2 * api.sessions.settings.max_viewers:
            await socket.close(4503, "as many clients listen as may; close one")
            return
        tasks = [
            asyncio.create_task(_tell(socket, session, after)),
            asyncio.create_task(_obey(socket, api, session)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _tell(socket: WebSocket, session: LiveSession, after: int) -> None:
    """The state, the receipts since `after`, and then everything as it happens."""
    listener = session.events.join(asyncio.get_running_loop())
    try:
        seq = session.events.next_seq - 1
        await socket.send_json({"seq": seq, "type": "state", "session": session.view()})
        for receipt in session.receipts.all():
            if receipt.seq > after or receipt.is_open:
                told = {"seq": receipt.seq, "type": "receipt", "receipt": receipt.to_plain()}
                await socket.send_json(told)
        while True:
            event, missed = await listener.next()
            if missed:
                await socket.send_json(
                    {"seq": event["seq"], "type": "state", "session": session.view()}
                )
            await socket.send_json(event)
            session.renew()
    except (WebSocketDisconnect, RuntimeError):
        return
    finally:
        session.events.leave(listener)


async def _obey(socket: WebSocket, api: Api, session: LiveSession) -> None:
    """Commands of a client; each is answered by a receipt event, or by what is wrong with it."""
    try:
        while True:
            text = await socket.receive_text()
            answer = await obey_text(api, session, text)
            if answer is not None:
                await socket.send_json(answer)
    except (WebSocketDisconnect, RuntimeError):
        return


async def obey_text(api: Api, session: LiveSession, text: str) -> dict[str, Any] | None:
    """Post a command that came as text; returns what is wrong with it, where it cannot be."""
    try:
        command = _COMMANDS.validate_json(text)
        await api.post(session, command, 0.0)
    except ValidationError as error:
        return {"type": "error", "detail": _first_wrong(error.errors(include_url=False))}
    except ScopeError as error:
        return {"type": "error", "detail": str(error)}
    return None


def _add_streams(app: FastAPI, api: Api) -> None:
    @app.get("/v1/sessions/{session_id}/stream.mjpeg")
    async def pictures(session_id: str) -> StreamingResponse:
        viewer = api.hub(session_id).join(Codec.JPEG, asyncio.get_running_loop())
        return StreamingResponse(mjpeg.parts(viewer), media_type=mjpeg.MEDIA_TYPE)

    @app.websocket("/v1/sessions/{session_id}/stream.fmp4")
    async def fragments(socket: WebSocket, session_id: str) -> None:
        await socket.accept()
        session = api.sessions.get(session_id)
        if session is None or session.hub is None:
            await socket.close(4404, "there is no such session, or nothing is shown yet")
            return
        try:
            viewer = session.hub.join_fragments(asyncio.get_running_loop())
        except TooManyViewersError as error:
            await socket.close(4503, str(error)[:100])
            return
        try:
            while (fragment := await viewer.next()) is not None:
                await socket.send_bytes(fragment.data)
            await socket.close()
        except (WebSocketDisconnect, RuntimeError):
            pass
        finally:
            viewer.leave()

    @app.post("/v1/sessions/{session_id}/whep", status_code=201)
    async def whep(session_id: str, request: Request) -> Response:
        if request.headers.get("content-type", "").split(";")[0] != "application/sdp":
            raise HTTPException(415, "send an offer as application/sdp")
        session, hub = api.session(session_id), api.hub(session_id)
        offer = (await request.body()).decode(errors="replace")
        viewer, answer = await api.peers_of(session_id).answer(
            hub, offer, lambda channel: _serve_channel(channel, api, session)
        )
        location = f"/v1/sessions/{session_id}/whep/{viewer}"
        return Response(answer, 201, media_type="application/sdp", headers={"Location": location})

    @app.delete("/v1/sessions/{session_id}/whep/{viewer}")
    async def left(session_id: str, viewer: str) -> Response:
        api.session(session_id)
        if not await api.peers_of(session_id).close(viewer):
            raise HTTPException(404, "there is no such viewer")
        return Response(status_code=200)

    @app.patch("/v1/sessions/{session_id}/whep/{viewer}")
    async def trickled(session_id: str, viewer: str) -> Response:
        raise HTTPException(405, "send all candidates with the offer", {"Allow": "DELETE"})

    @app.get("/v1/sessions/{session_id}/recordings")
    async def recordings(session_id: str) -> list[dict[str, Any]]:
        return api.hub(session_id).recordings()

    @app.get("/v1/sessions/{session_id}/recordings/{name}")
    async def recording(session_id: str, name: str) -> FileResponse:
        path = recording_file(api.session(session_id).files.recordings, name.removesuffix(".mp4"))
        if path is None:
            raise HTTPException(404, f"there is no recording {name[:64]!r}")
        return FileResponse(path, media_type="video/mp4", filename=path.name)


def _serve_channel(channel: Any, api: Api, session: LiveSession) -> None:
    """The events of a session over a data channel, and commands the other way."""

    rate = Rate(api.sessions.settings.requests_per_s)

    async def obey(text: str) -> None:
        if rate.take():
            channel.send(json.dumps({"type": "error", "detail": "ask less often"}))
            return
        answer = await obey_text(api, session, text)
        if answer is not None and channel.readyState == "open":
            channel.send(json.dumps(answer))

    async def tell() -> None:
        listener = session.events.join(asyncio.get_running_loop())
        try:
            while channel.readyState == "open":
                event, _ = await listener.next()
                if channel.readyState == "open":
                    channel.send(json.dumps(event))
        finally:
            session.events.leave(listener)

    task = asyncio.create_task(tell())
    channel.on("close", task.cancel)
    channel.on("message", lambda text: asyncio.ensure_future(obey(str(text))))
