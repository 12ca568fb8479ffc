"""What a session shows, over HTTP, WebSocket and WHEP."""

import asyncio
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response, WebSocket
from fastapi.responses import FileResponse, StreamingResponse
from starlette.websockets import WebSocketDisconnect

from scope_runners.serve.api_commands import serve_channel
from scope_runners.serve.api_state import Api
from scope_runners.serve.media.encoder import Codec
from scope_runners.serve.media.hub import TooManyViewersError
from scope_runners.serve.media.mjpeg import pictures_for
from scope_runners.serve.media.recording import recording_file
from scope_runners.serve.media.viewer import Viewer


def add_streams(app: FastAPI, api: Api) -> None:
    @app.get("/v1/sessions/{session_id}/stream.mjpeg")
    async def pictures(session_id: str) -> StreamingResponse:
        viewer = api.hub(session_id).join(Codec.JPEG, asyncio.get_running_loop())
        return pictures_for(viewer)

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
        gone = asyncio.create_task(_leave_with(socket, viewer))
        try:
            while (fragment := await viewer.next()) is not None:
                await socket.send_bytes(fragment.data)
            await socket.close()
        except (WebSocketDisconnect, RuntimeError):
            pass
        finally:
            gone.cancel()
            viewer.leave()

    @app.post("/v1/sessions/{session_id}/whep", status_code=201)
    async def whep(session_id: str, request: Request) -> Response:
        if request.headers.get("content-type", "").split(";")[0] != "application/sdp":
            raise HTTPException(415, "send an offer as application/sdp")
        session, hub = api.session(session_id), api.hub(session_id)
        offer = (await request.body()).decode(errors="replace")
        viewer, answer = await api.peers_of(session_id).answer(
            hub, offer, lambda channel: serve_channel(channel, api, session)
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
    def recordings(session_id: str) -> list[dict[str, Any]]:
        return api.hub(session_id).recordings()

    @app.get("/v1/sessions/{session_id}/recordings/{name}")
    def recording(session_id: str, name: str) -> FileResponse:
        path = recording_file(api.session(session_id).files.recordings, name.removesuffix(".mp4"))
        if path is None:
            raise HTTPException(404, f"there is no recording {name[:64]!r}")
        return FileResponse(path, media_type="video/mp4", filename=path.name)


async def _leave_with(socket: WebSocket, viewer: Viewer) -> None:
    """A viewer's client is gone: nobody who only sends sees that while the stream stands still."""
    while (await socket.receive())["type"] != "websocket.disconnect":
        continue
    viewer.leave()
