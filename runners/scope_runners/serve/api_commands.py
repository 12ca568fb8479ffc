"""Commands and receipts over HTTP, and over a WebSocket or a data channel with all events."""

import asyncio
import json
from contextlib import suppress
from typing import Any

from fastapi import FastAPI, HTTPException, Query, WebSocket
from pydantic import TypeAdapter, ValidationError
from starlette.websockets import WebSocketDisconnect

from scope_contracts.errors import ScopeError
from scope_runners.serve.api_state import Api, first_wrong
from scope_runners.serve.commands import AnyCommand
from scope_runners.serve.event_feed import feed
from scope_runners.serve.events import Event
from scope_runners.serve.rates import Rate
from scope_runners.serve.session import LiveSession

_MOST_WAIT_S = 60.0
_MOST_UNREAD_BYTES = 2**18
"""That a data channel may hold for a peer that takes them slowly."""
_LOOK_S = 0.05
_COMMANDS: TypeAdapter[Any] = TypeAdapter(AnyCommand)


def add_commands(app: FastAPI, api: Api) -> None:
    @app.post("/v1/sessions/{session_id}/commands")
    async def post(
        session_id: str, command: AnyCommand, wait_s: float = Query(10.0, ge=0, le=_MOST_WAIT_S)
    ) -> dict[str, Any]:
        session = api.session(session_id)
        return (await api.post(session, command, wait_s)).to_plain()

    @app.get("/v1/sessions/{session_id}/commands")
    def receipts(session_id: str) -> list[dict[str, Any]]:
        return [each.to_plain() for each in api.session(session_id).receipts.all()]

    @app.get("/v1/sessions/{session_id}/commands/{command_id}")
    def receipt(session_id: str, command_id: str) -> dict[str, Any]:
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
        if session.events.num_listeners >= api.most_listeners:
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
    try:
        await feed(session, socket.send_json, after=after)
        await socket.close(4404, "the session was deleted")
    except (WebSocketDisconnect, RuntimeError):
        return


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
        return {"type": "error", "detail": first_wrong(error.errors(include_url=False))}
    except ScopeError as error:
        return {"type": "error", "detail": str(error)}
    return None


def serve_channel(channel: Any, api: Api, session: LiveSession) -> None:
    """The events of a session over a data channel, and commands the other way."""
    if session.events.num_listeners >= api.most_listeners:
        channel.close()
        return
    rate = Rate(api.sessions.settings.requests_per_s)

    async def send(event: Event) -> None:
        while channel.readyState == "open" and channel.bufferedAmount > _MOST_UNREAD_BYTES:
            await asyncio.sleep(_LOOK_S)
        if channel.readyState != "open":
            raise RuntimeError("the channel is closed")
        channel.send(json.dumps(event))

    async def obey(text: str) -> None:
        is_unread = channel.bufferedAmount > _MOST_UNREAD_BYTES
        answer: Event | None = {"type": "error", "detail": "ask less often"}
        if not rate.take():
            answer = await obey_text(api, session, text)
        if answer is not None and channel.readyState == "open" and not is_unread:
            channel.send(json.dumps(answer))

    async def tell() -> None:
        with suppress(RuntimeError):
            await feed(session, send, after=0)
            channel.close()

    task = asyncio.create_task(tell())
    channel.on("close", task.cancel)
    channel.on("message", lambda text: asyncio.ensure_future(obey(str(text))))
