"""Fragments and pictures over HTTP reach any client, and none is held for one that has gone."""

import asyncio
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import av
import httpx
import numpy as np
import pytest
from PIL import Image
from starlette.types import Message
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from scope_runners.serve.media.encoder import Codec
from scope_runners.serve.media.mjpeg import pictures_for
from tests.serve.media.shown_hub import RED, is_colour, shown_hub
from tests.serve.media.shown_server import ShownServer, shown_server
from tests.serve.running_server import until

BOUND_S = 60.0


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ShownServer]:
    with shown_server(tmp_path, max_viewers=2) as served:
        yield served


def fragments_url(served: ShownServer) -> str:
    return f"ws://127.0.0.1:{served.server.port}{served.path}/stream.fmp4"


def test_fragments_over_a_websocket_are_a_video(served: ShownServer) -> None:
    with connect(fragments_url(served)) as socket:
        fragments = [socket.recv(timeout=BOUND_S) for _ in range(5)]
    with av.open(BytesIO(b"".join(bytes(each) for each in fragments)), "r") as container:
        pictures = [each.to_ndarray(format="rgb24") for each in container.decode(video=0)]
    assert len(pictures) == 5
    assert is_colour(np.asarray(pictures[-1], np.uint8), RED)
    served.nobody_watches()


def test_a_viewer_of_a_stream_that_stands_still_is_gone_when_it_has_left(
    served: ShownServer,
) -> None:
    with connect(fragments_url(served)) as socket:
        socket.recv(timeout=BOUND_S)
        served.shown.pause()
        assert served.shown.hub.num_viewers == 1
    served.nobody_watches()
    with served.server.client() as client, client.stream("GET", pictures_url(served)) as answer:
        assert answer.status_code == 200
        assert served.shown.hub.num_viewers == 1
    served.nobody_watches()


def pictures_url(served: ShownServer) -> str:
    return f"{served.path}/stream.mjpeg"


def test_pictures_come_as_parts_that_any_browser_shows(served: ShownServer) -> None:
    with served.server.client() as client, client.stream("GET", pictures_url(served)) as answer:
        assert answer.headers["content-type"] == "multipart/x-mixed-replace; boundary=frame"
        got = b""
        for part in answer.iter_bytes():
            got += part
            if got.count(b"--frame\r\n") > 3:
                break
    head, _, rest = got.removeprefix(b"--frame\r\n").partition(b"\r\n\r\n")
    length = int(head.split(b"Content-Length: ")[1])
    assert rest[length:].startswith(b"\r\n--frame\r\n")
    assert is_colour(np.asarray(Image.open(BytesIO(rest[:length]))), RED)
    served.nobody_watches()


def test_a_viewer_beyond_the_limit_is_told_so_on_every_path(served: ShownServer) -> None:
    with connect(fragments_url(served)) as first, connect(fragments_url(served)) as second:
        first.recv(timeout=BOUND_S)
        second.recv(timeout=BOUND_S)
        with connect(fragments_url(served)) as third, pytest.raises(ConnectionClosed, match="4503"):
            third.recv(timeout=BOUND_S)
        with served.server.client() as client:
            refused = client.get(pictures_url(served))
        assert refused.status_code == 503
        assert "--max-viewers" in refused.json()["detail"]
    served.nobody_watches()


def test_a_client_that_left_before_its_answer_began_is_no_viewer(tmp_path: Path) -> None:
    async def ask() -> None:
        viewer = shown.hub.join(Codec.JPEG, asyncio.get_running_loop())
        response = pictures_for(viewer)

        async def receive() -> Message:
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            await asyncio.Event().wait()  # nobody reads

        scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
        await asyncio.wait_for(response(scope, receive, send), BOUND_S)
        assert shown.hub.num_viewers == 0

    with shown_hub(tmp_path) as shown:
        asyncio.run(ask())


def test_recordings_are_listed_and_downloaded_and_nothing_else_is(served: ShownServer) -> None:
    hub = served.shown.hub
    hub.start_recording("take-1")
    until(lambda: hub._recordings["take-1"].num_frames > 8, what="some frames")
    hub.stop_recording("take-1")
    folder = served.server.sessions.all()[0].files.recordings
    folder.mkdir(parents=True, exist_ok=True)
    until(lambda: hub.recording is None, what="its end")
    (folder / "take-1.mp4").write_bytes((hub._folder / "take-1.mp4").read_bytes())
    with served.server.client() as client:
        (listed,) = client.get(f"{served.path}/recordings").json()
        assert listed["name"] == "take-1"
        for name in ("take-1", "take-1.mp4"):
            file = client.get(f"{served.path}/recordings/{name}")
            assert file.headers["content-type"] == "video/mp4"
            assert file.content == (folder / "take-1.mp4").read_bytes()
        for name in ("take-2", "%2e%2e%2fjournal", "%00", "take-1.mp4.mp4"):
            assert client.get(f"{served.path}/recordings/{name}").status_code in (404, 405), name


def test_where_nothing_is_shown_yet_a_viewer_is_told_to_try_again(served: ShownServer) -> None:
    served.server.sessions.all()[0].stage.hub = None
    with served.server.client() as client:
        for path in ("stream.mjpeg", "recordings"):
            answer = client.get(f"{served.path}/{path}")
            assert answer.status_code == 409
            assert "try again" in answer.json()["detail"]
    with connect(fragments_url(served)) as socket, pytest.raises(ConnectionClosed, match="4404"):
        socket.recv(timeout=BOUND_S)
    assert httpx.get(f"{served.server.url}/v1/sessions/none/stream.mjpeg").status_code == 404
