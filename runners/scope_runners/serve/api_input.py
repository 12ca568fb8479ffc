"""Video in over HTTP: a file as a body, or a camera over WHIP."""

import uuid
from typing import Annotated, Any

from aiortc import RTCConfiguration
from fastapi import FastAPI, HTTPException, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from scope_contracts.errors import UserInputError
from scope_rt.control.motion_noise import MotionNoise
from scope_runners.serve.api_state import Api
from scope_runners.serve.media.newest_frames import NewestFrames
from scope_runners.serve.media.video_in import CameraSource, FileSource
from scope_runners.serve.media.webrtc import ice_of
from scope_runners.serve.session import LiveSession

DEFAULT_NOISE = 0.1
_CHUNKS_KEPT = 2
Scale = Annotated[float, Query(gt=0, lt=1)]


def add_input(app: FastAPI, api: Api) -> None:
    """Add the routes."""

    @app.post("/v1/sessions/{session_id}/input", status_code=201)
    async def given(
        session_id: str,
        request: Request,
        noise_low: Scale = DEFAULT_NOISE,
        noise_high: Scale = DEFAULT_NOISE,
    ) -> dict[str, Any]:
        """The body is a video file, which plays in a loop."""
        session = api.session(session_id)
        noise, frames = MotionNoise(low=noise_low, high=noise_high), _frames(session)
        path = session.files.folder / f"input-{uuid.uuid4().hex}"
        try:
            with path.open("wb") as file:
                async for part in request.stream():
                    await run_in_threadpool(file.write, part)
            source = await run_in_threadpool(FileSource, path, frames, name="file")
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        session.stage.video.begin(source, noise)
        return {"input": session.stage.video.told}

    @app.get("/v1/sessions/{session_id}/input")
    async def told(session_id: str) -> dict[str, Any]:
        return {"input": api.session(session_id).stage.video.told}

    @app.delete("/v1/sessions/{session_id}/input", status_code=204)
    async def ended(session_id: str) -> Response:
        await run_in_threadpool(api.session(session_id).stage.video.end)
        return Response(status_code=204)

    @app.post("/v1/sessions/{session_id}/whip", status_code=201)
    async def camera(
        session_id: str,
        request: Request,
        noise_low: Scale = DEFAULT_NOISE,
        noise_high: Scale = DEFAULT_NOISE,
    ) -> Response:
        """A sender's offer; the stream takes the newest of its pictures."""
        if request.headers.get("content-type", "").split(";")[0] != "application/sdp":
            raise HTTPException(415, "send an offer as application/sdp")
        session = api.session(session_id)
        noise, video = MotionNoise(low=noise_low, high=noise_high), session.stage.video
        source = CameraSource(_frames(session), on_end=video.end)
        offer = (await request.body()).decode(errors="replace")
        settings = api.sessions.settings
        answer = await source.answer(
            offer, RTCConfiguration(iceServers=ice_of(settings.ice_servers))
        )
        video.begin(source, noise)
        location = {"Location": f"/v1/sessions/{session_id}/input"}
        return Response(answer, 201, media_type="application/sdp", headers=location)


def _frames(session: LiveSession) -> NewestFrames:
    ready = session.stage.ready
    if ready is None:
        raise UserInputError("its ranks are not ready yet; try again once the session is live")
    return NewestFrames(
        fps=ready.fps,
        width=ready.width,
        height=ready.height,
        most=_CHUNKS_KEPT * ready.chunk_frames,
    )
