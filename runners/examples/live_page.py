"""A live page: watch the stream, change its prompt, cut; any number of viewers, none slows it.

    pip install fastapi uvicorn
    python runners/examples/live_page.py        # then open http://127.0.0.1:8000

One thread runs the stream and gives every chunk to a `ViewerHub`; a viewer that does not read
loses its own oldest chunks. Pictures travel as JPEG, which any browser shows.
"""

import threading
import time
from collections.abc import Iterator
from io import BytesIO

from fastapi import FastAPI, HTTPException
from fastapi.responses import HTMLResponse, StreamingResponse
from PIL import Image
from pydantic import BaseModel

from scope_rt import Chunk, StreamConfig, StreamSession, UserInputError
from scope_rt.video.viewers import ViewerHub

PAGE = """<!doctype html><title>scope-rt</title>
<body style="background:#111;color:#eee;font:16px sans-serif;text-align:center">
<p><img src="/video" width="512" style="image-rendering:pixelated"></p>
<form onsubmit="fetch('/prompt',{method:'POST',headers:{'content-type':'application/json'},
body:JSON.stringify({text:this.text.value})}).then(r=>r.json()).then(j=>said.textContent=
j.detail||'takes effect at chunk '+j.chunk_index);return false">
<input name="text" size="48" value="a green triangle, fast, on navy">
<button>change the prompt</button>
<button type="button" onclick="fetch('/cut',{method:'POST'})">cut</button></form>
<p id="said"></p>"""


class LiveStream:
    """One endless stream on a thread of its own, at the model's own pace."""

    def __init__(self, config: StreamConfig, prompt: str) -> None:
        self.session = StreamSession(config)
        self.hub: ViewerHub[Chunk] = ViewerHub()
        self.fps = self.session.setup.recipe.fps
        self._prompt, self._stop = prompt, threading.Event()
        self._thread = threading.Thread(target=self._run, name="stream")
        self._thread.start()

    def close(self) -> None:
        """End the stream; waits for the chunk that is under way."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with self.session as session:
            due_s = time.monotonic()
            for chunk in session.stream(self._prompt):
                self.hub.emit(chunk)
                due_s = max(due_s, time.monotonic()) + len(chunk.frames) / self.fps
                if self._stop.wait(max(0.0, due_s - time.monotonic() - 1.0)):
                    break
        self.hub.close()


class Prompt(BaseModel):
    """What a person typed."""

    text: str


def app_of(stream: LiveStream) -> FastAPI:
    """The page and its three calls."""
    app = FastAPI(title="scope-rt live page")

    @app.get("/", response_class=HTMLResponse)
    def page() -> str:
        return PAGE

    @app.get("/video")
    def video() -> StreamingResponse:
        return StreamingResponse(
            _jpegs(stream), media_type="multipart/x-mixed-replace; boundary=frame"
        )

    @app.post("/prompt")
    def prompt(asked: Prompt) -> dict[str, int | None]:
        try:
            taken = stream.session.prompt(asked.text).wait(10.0)
        except UserInputError as error:
            raise HTTPException(status_code=422, detail=str(error)) from error
        return {"chunk_index": None if taken is None else taken.chunk_index}

    @app.post("/cut")
    def cut() -> dict[str, int | None]:
        taken = stream.session.hard_cut().wait(10.0)
        if taken is not None:
            stream.hub.cut(taken.cache_epoch)
        return {"chunk_index": None if taken is None else taken.chunk_index}

    return app


def _jpegs(stream: LiveStream) -> Iterator[bytes]:
    """Pictures for one viewer, at the stream's pace, until the stream ends or the viewer leaves."""
    viewer = stream.hub.join(max_chunks=2)
    try:
        while (chunk := viewer.next(timeout_s=60.0)) is not None:
            for frame_HWC in chunk.frames:
                picture = BytesIO()
                Image.fromarray(frame_HWC).save(picture, "JPEG", quality=90)
                yield b"--frame\r\nContent-Type: image/jpeg\r\n\r\n" + picture.getvalue() + b"\r\n"
                time.sleep(1 / stream.fps)
    finally:
        viewer.leave()


def main() -> int:
    import uvicorn

    stream = LiveStream(StreamConfig.load(), "a red circle and a blue square, on navy")
    try:
        uvicorn.run(app_of(stream), host="127.0.0.1", port=8000)
    finally:
        stream.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
