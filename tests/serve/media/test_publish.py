"""A stream reaches media servers of others, again after they were gone, and names no secret."""

import asyncio
import shutil
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import pytest
import uvicorn
from aiortc import RTCPeerConnection, RTCSessionDescription
from fastapi import FastAPI, Request, Response

from scope_contracts.errors import UserInputError
from scope_runners.serve.media import publish
from scope_runners.serve.media.publish import Publication, PublicationState
from tests.serve.media.shown_hub import GREEN, RED, ShownHub, is_colour, shown_hub

needs_ffmpeg = pytest.mark.skipif(
    shutil.which("ffmpeg") is None, reason="no ffmpeg to listen; install it"
)
BOUND_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def published(shown: ShownHub, url: str) -> Publication:
    return Publication(
        shown.hub, url, ice_servers=[], tell=lambda kind, **data: shown._tell(kind, **data)
    )


async def until(look: Callable[[], Any], what: str) -> None:
    deadline_s = asyncio.get_running_loop().time() + BOUND_S
    while not look():
        assert asyncio.get_running_loop().time() < deadline_s, what
        await asyncio.sleep(0.05)


@needs_ffmpeg
@pytest.mark.parametrize("kind", ["rtmp", "srt"])
def test_an_ffmpeg_listener_gets_the_stream_again_after_it_was_gone(
    tmp_path: Path, kind: str
) -> None:
    port = free_port()
    listen = {
        "rtmp": ["-listen", "1", "-i", f"rtmp://127.0.0.1:{port}/live/key"],
        "srt": ["-i", f"srt://127.0.0.1:{port}?mode=listener"],
    }[kind]
    url = {"rtmp": f"rtmp://127.0.0.1:{port}/live/key", "srt": f"srt://127.0.0.1:{port}"}[kind]

    def listener(name: str) -> "subprocess.Popen[bytes]":
        command = ["ffmpeg", "-v", "error", "-y", *listen, "-c", "copy"]
        command += ["-f", "mpegts", "-flush_packets", "1", str(tmp_path / name)]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def has_begun(name: str) -> bool:
        path = tmp_path / name
        return path.exists() and path.stat().st_size > 20_000

    async def run(shown: ShownHub) -> None:
        publication = published(shown, url)
        publication.start()
        first = listener("first.ts")

        # A listener looks at some seconds of a stream before it writes any.
        def is_final() -> bool:
            return publication.state is PublicationState.FAILED

        await until(lambda: has_begun("first.ts") or is_final(), "a listener gets packets")
        if is_final():
            first.kill()
            pytest.skip(publication.detail)
        assert publication.state is PublicationState.LIVE
        first.kill()
        first.wait()
        await until(lambda: publication.state is PublicationState.RETRYING, "it is missed")
        second = listener("second.ts")
        await until(lambda: has_begun("second.ts"), "the next one gets packets")
        await publication.end()
        await asyncio.to_thread(second.wait, 20)
        assert publication.told()["state"] == "ended"

    with shown_hub(tmp_path) as shown:
        asyncio.run(run(shown))
    for name in ("first.ts", "second.ts"):
        with av.open(str(tmp_path / name)) as container:
            pictures: list[Any] = [
                each.to_ndarray(format="rgb24") for each in container.decode(video=0)
            ]
        assert len(pictures) > 8
        assert is_colour(pictures[-1], RED)


class WhipEndpoint:
    """A WHIP server, by its specification: an offer is answered, its resource is deleted."""

    def __init__(self, token: str) -> None:
        self.pictures: list[Any] = []
        self.num_deleted = 0
        self.app, self.port = FastAPI(), free_port()
        self._peers: list[RTCPeerConnection] = []

        @self.app.post("/whip/room")
        async def offered(request: Request) -> Response:
            if request.headers.get("authorization") != f"Bearer {token}":
                return Response(status_code=401)
            peer = RTCPeerConnection()
            self._peers.append(peer)
            peer.on("track", lambda track: asyncio.ensure_future(self._read(track)))
            offer = (await request.body()).decode()
            await peer.setRemoteDescription(RTCSessionDescription(sdp=offer, type="offer"))
            await peer.setLocalDescription(await peer.createAnswer())
            headers = {"location": "/whip/room/1"}
            answer = peer.localDescription.sdp
            return Response(answer, 201, media_type="application/sdp", headers=headers)

        @self.app.delete("/whip/room/1")
        async def deleted() -> Response:
            self.num_deleted += 1
            return Response(status_code=200)

    async def drop(self) -> None:
        """As a server that is started anew."""
        while self._peers:
            await self._peers.pop().close()

    async def _read(self, track: Any) -> None:
        while True:
            picture = await track.recv()
            self.pictures.append(picture.to_ndarray(format="rgb24"))


def test_a_whip_endpoint_gets_the_stream_and_again_after_it_dropped_it(tmp_path: Path) -> None:
    endpoint = WhipEndpoint("let-me-in")

    async def run(shown: ShownHub) -> None:
        config = uvicorn.Config(endpoint.app, port=endpoint.port, log_level="error")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        await until(lambda: server.started, "the endpoint")
        url = f"http://x:let-me-in@127.0.0.1:{endpoint.port}/whip/room"
        publication = published(shown, url)
        publication.start()
        await until(lambda: len(endpoint.pictures) > 4, "pictures")
        assert is_colour(endpoint.pictures[-1], RED)
        shown.colour = GREEN
        await until(lambda: is_colour(endpoint.pictures[-1], GREEN), "the next colour")
        await endpoint.drop()
        await until(lambda: publication.state is PublicationState.RETRYING, "it is missed")
        before = len(endpoint.pictures)
        await until(lambda: len(endpoint.pictures) > before + 4, "pictures once more")
        await publication.end()
        assert endpoint.num_deleted >= 1
        await endpoint.drop()
        server.should_exit = True
        await serving

    with shown_hub(tmp_path) as shown:
        asyncio.run(run(shown))
        said = str(shown.told)
    assert "let-me-in" not in said
    assert "room" not in said


def test_a_refusal_is_said_and_tried_again(tmp_path: Path) -> None:
    async def run(shown: ShownHub) -> None:
        publication = published(shown, f"http://127.0.0.1:{free_port()}/secret#token=hidden")
        publication.start()
        await until(lambda: publication.state is PublicationState.RETRYING, "a refusal")
        assert "does not answer as a WHIP server" in publication.detail
        assert "again in" in publication.detail
        assert not {"secret", "hidden"} & set(str(publication.told()).replace("/", " ").split())
        await publication.end()

    with shown_hub(tmp_path) as shown:
        asyncio.run(run(shown))


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://host/x", "rtmp:", "nonsense", ""])
def test_what_is_no_place_to_publish_to_is_refused_by_name(tmp_path: Path, url: str) -> None:
    with (
        shown_hub(tmp_path) as shown,
        pytest.raises(UserInputError, match=r"url: give one of rtmp"),
    ):
        published(shown, url)


def test_a_server_that_reads_nothing_holds_up_neither_stream_nor_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "ANSWER_S", 1.0)

    async def run(shown: ShownHub) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            publication = published(shown, f"rtmp://127.0.0.1:{silent.getsockname()[1]}/live/key")
            publication.start()
            await until(lambda: publication.state is PublicationState.RETRYING, "it is given up")
            assert "taken nothing for 1 s" in publication.detail
            await publication.end()

    with shown_hub(tmp_path) as shown:
        asyncio.run(run(shown))
