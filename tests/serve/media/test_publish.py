"""A stream reaches media servers that exist: by RTMP and by WHIP, again after they were gone, and
nobody is shown the secrets of a URL."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from aiortc import RTCPeerConnection, RTCSessionDescription

from scope_contracts.errors import UserInputError
from scope_runners.main import main
from scope_runners.serve.group_control import GroupControl
from scope_runners.serve.media.encoder import Codec, VideoEncoder
from scope_runners.serve.media.publish import Backoff, Publications
from scope_runners.serve.media.publish_target import MOST_PUBLICATIONS, target_of
from scope_runners.serve.media.push import record
from tests.serve.idle_server import idle_server, idle_settings
from tests.serve.media.shown_hub import FPS, GREEN, RED, ShownHub, is_colour, played, shown_hub
from tests.serve.running_server import until

SECRET = "s3cr3t-k3y"


@dataclass(slots=True)
class Told:
    """The events of a session."""

    events: list[dict[str, Any]] = field(default_factory=list)

    def publish(self, kind: str, **data: Any) -> int:
        self.events.append({"type": kind, **data})
        return len(self.events)

    def states(self) -> list[str]:
        return [event["state"] for event in self.events]


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[ShownHub]:
    with shown_hub(tmp_path) as shown:
        yield shown


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def publications(shown: ShownHub, told: Told) -> Iterator[Publications]:
    publications = Publications(hub=lambda: shown.hub, tell=told.publish)
    yield publications
    publications.close()
    assert shown.hub.num_viewers == 0, "nobody watches for a publication that has ended"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


# What may be published where.


@pytest.mark.parametrize(
    ("url", "shown", "token"),
    [
        (f"rtmp://a.example/live/{SECRET}", "rtmp://a.example/...", ""),
        (f"rtmps://u:{SECRET}@a.example:443/x", "rtmps://a.example:443/...", ""),
        (f"srt://[::1]:9000?passphrase={SECRET}", "srt://[::1]:9000/...", ""),
        (f"rtsp://u:{SECRET}@a.example", "rtsp://a.example", ""),
        (f"https://a.example/whip/x#token={SECRET}", "https://a.example/...", SECRET),
        (f"http://{SECRET}@a.example/whip", "http://a.example/...", SECRET),
        (f"http://u:{SECRET}@a.example/whip?key={SECRET}", "http://a.example/...", SECRET),
    ],
)
def test_of_a_url_only_the_host_is_shown(url: str, shown: str, token: str) -> None:
    target = target_of(url)
    assert (target.shown, target.token) == (shown, token)
    assert SECRET not in repr(target)
    if not target.format:
        assert "@" not in target.url
        assert "#" not in target.url, "the token goes into a header"


@pytest.mark.parametrize(
    "url",
    [
        f"file:///tmp/{SECRET}",
        f"pipe:{SECRET}",
        f"concat:rtmp://{SECRET}",
        f"rtmp:///{SECRET}",
        f"rtmp://a:port/{SECRET}",
        f"rtmp://[a/{SECRET}",
        f"rtmp://a/{SECRET} listen=1",
        f"rtmp://a/{SECRET}\n",
        f"http://a/#token={SECRET}%0ax-other:1",
        f"rtmp://a/{SECRET * 300}",
    ],
)
def test_other_urls_are_refused_in_a_sentence_without_them(url: str) -> None:
    with pytest.raises(UserInputError, match=r"^url: ") as refused:
        target_of(url)
    assert SECRET not in str(refused.value)


def test_attempts_are_one_second_apart_and_then_up_to_thirty() -> None:
    backoff = Backoff()
    assert [backoff.after(0.0) for _ in range(7)] == [1, 2, 4, 8, 16, 30, 30]
    assert backoff.after(31.0) == 1, "it was there in between"


# RTMP.


def listening(port: int, file: Path) -> "subprocess.Popen[bytes]":
    """A media server: it takes one publisher."""
    command = ["ffmpeg", "-v", "error", "-analyzeduration", "500000", "-f", "flv", "-listen", "1"]
    command += ["-i", f"rtmp://127.0.0.1:{port}/live/{SECRET}", "-c", "copy"]
    command += ["-flush_packets", "1", "-y", str(file)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)


def frames_of(path: Path) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    with av.open(str(path)) as container:
        frames = (frame.to_ndarray(format="rgb24") for frame in container.decode(video=0))
        return [frame.astype(np.uint8) for frame in frames]


needs_ffmpeg = pytest.mark.skipif(
    shutil.which("ffmpeg") is None, reason="no ffmpeg program to listen for RTMP; install it"
)


@needs_ffmpeg
def test_an_rtmp_server_gets_the_pictures_and_again_after_it_was_killed(
    publications: Publications, told: Told, tmp_path: Path, shown: ShownHub
) -> None:
    port = free_port()
    publications.begin(f"rtmp://127.0.0.1:{port}/live/{SECRET}")
    until(lambda: "retrying" in told.states(), what="nobody listens yet")

    def is_live() -> bool:
        return str(publications.told[0]["state"]) == "live"

    first = listening(port, tmp_path / "first.flv")
    try:
        until(is_live, what="the first server")
        until(lambda: growing(tmp_path / "first.flv"), what="its pictures")
    finally:
        first.kill()
        first.wait(20)
    until(lambda: not is_live(), what="that it is gone")
    second = listening(port, tmp_path / "second.mp4")
    try:
        until(is_live, what="the second server")
        until(lambda: shown.hub.num_viewers == 1, what="packets for it")
        threading.Event().wait(2.0)  # pictures for it
    finally:
        publications.close()
        second.wait(20)
    frames = frames_of(tmp_path / "second.mp4")
    assert len(frames) > 12
    assert all(is_colour(frame, RED) for frame in frames)
    assert publications.told == []
    assert SECRET not in str(told.events)
    assert told.states()[-1] == "ended"


def growing(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def test_a_server_that_never_answers_holds_up_nothing(
    publications: Publications, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own process waits for it, and is killed with the publication."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        name = publications.begin(f"rtmp://127.0.0.1:{port}/live")["id"]
        silent.settimeout(20)
        end, _ = silent.accept()
        with end:
            assert publications.told[0]["state"] == "connecting"
            assert publications.end(name)
            end.settimeout(20)
            while end.recv(65536):
                pass  # what it had to say, and then its end
    assert told.states() == ["connecting", "ended"]


def test_a_sender_that_waits_for_its_server_is_ended_by_the_kernel() -> None:
    """It holds the interpreter's lock while it does: nothing of its own could end it."""
    encoder = VideoEncoder(Codec.H264, width=64, height=64, fps=Fraction(FPS))
    key = encoder.encode(played(RED, 0), as_key=True)
    assert key is not None
    program = "from scope_runners.serve.media import mux_process; mux_process.STEP_S = 1; "
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"rtmp://127.0.0.1:{silent.getsockname()[1]}/live"
        said = json.dumps({"url": url, "format": "flv"}).encode() + b"\n" + record(key)
        ended = subprocess.run(
            [sys.executable, "-c", f"{program}mux_process.main()"],
            input=said,
            capture_output=True,
            timeout=60,
            check=False,
        )
    assert ended.returncode == -signal.SIGALRM
    assert ended.stdout == b""


def test_srt_is_sent_or_said_to_be_missing(publications: Publications, told: Told) -> None:
    """PyAV's own builds have no SRT."""
    publications.begin(f"srt://127.0.0.1:{free_port()}?passphrase={SECRET}")
    until(lambda: told.states()[-1] in ("failed", "retrying"), what="an answer")
    if told.states()[-1] == "failed":
        assert "has not this protocol; publish by another" in told.events[-1]["detail"]
    assert SECRET not in str(told.events)


# WHIP.


class WhipServer:
    """An endpoint as of RFC 9725, on an event loop of its own."""

    def __init__(self) -> None:
        self.frames: list[Any] = []
        self.asked: list[tuple[str, str, str]] = []
        self.answers_with: int | None = None
        self.location = "/whip/resource-7"
        self._loop = asyncio.new_event_loop()
        self._peers: list[RTCPeerConnection] = []
        self._readers: list[asyncio.Future[None]] = []
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server = threading.Thread(target=self._http.serve_forever, args=(0.05,))
        self._server.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}/whip"

    def methods(self) -> list[str]:
        return [method for method, _, _ in self.asked]

    def drop_peers(self) -> None:
        asyncio.run_coroutine_threadsafe(self._drop_peers(), self._loop).result(20)

    def close(self) -> None:
        self.drop_peers()
        self._http.shutdown()
        self._http.server_close()
        self._server.join(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()

    def _handler(whip) -> type[BaseHTTPRequestHandler]:  # noqa: N805
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self._note()
                body = self.rfile.read(int(self.headers["content-length"])).decode()
                if whip.answers_with is not None:
                    self._say(whip.answers_with, b"")
                    return
                assert self.headers["content-type"] == "application/sdp"
                answering = asyncio.run_coroutine_threadsafe(whip._answer(body), whip._loop)
                self._say(201, answering.result(20).encode(), location=whip.location)

            def do_DELETE(self) -> None:
                self._note()
                self._say(200, b"")

            def _note(self) -> None:
                whip.asked.append(
                    (self.command, self.path, self.headers.get("authorization") or "")
                )

            def _say(self, status: int, body: bytes, **headers: str) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("content-type", "application/sdp")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: Any) -> None: ...

        return Handler

    async def _answer(self, offer: str) -> str:
        peer = RTCPeerConnection()
        self._peers.append(peer)
        peer.on(
            "track", lambda track: self._readers.append(asyncio.ensure_future(self._read(track)))
        )
        await peer.setRemoteDescription(RTCSessionDescription(sdp=offer, type="offer"))
        await peer.setLocalDescription(await peer.createAnswer())
        return str(peer.localDescription.sdp)

    async def _read(self, track: Any) -> None:
        while True:
            frame = await track.recv()
            self.frames.append(frame.to_ndarray(format="rgb24"))

    async def _drop_peers(self) -> None:
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        await asyncio.gather(*(peer.close() for peer in self._peers))
        self._peers.clear()
        self._readers.clear()


@pytest.fixture
def whip() -> Iterator[WhipServer]:
    server = WhipServer()
    yield server
    server.close()


def test_a_whip_endpoint_gets_the_pictures_and_again_after_its_peer_was_gone(
    publications: Publications, told: Told, whip: WhipServer, shown: ShownHub
) -> None:
    view = publications.begin(f"{whip.url}?key={SECRET}#token={SECRET}")
    assert view["url"] == whip.url.replace("whip", "...")
    until(lambda: len(whip.frames) > 12, what="pictures")
    assert all(is_colour(frame, RED) for frame in whip.frames)
    shown.colour = GREEN
    until(lambda: is_colour(whip.frames[-1], GREEN), what="the next colour")
    whip.drop_peers()
    num_before = len(whip.frames)
    until(lambda: len(whip.frames) > num_before + 12, what="pictures again")
    assert publications.told[0]["reconnects"] == 1
    assert publications.end(view["id"])
    assert all(is_colour(frame, GREEN) for frame in whip.frames[num_before + 1 :])
    assert whip.methods() == ["POST", "DELETE", "POST", "DELETE"]
    assert {credentials for _, _, credentials in whip.asked} == {f"Bearer {SECRET}"}
    assert {path for method, path, _ in whip.asked if method == "DELETE"} == {"/whip/resource-7"}
    assert SECRET not in str(told.events)


def test_a_publication_ends_with_its_stream(
    publications: Publications, told: Told, whip: WhipServer, shown: ShownHub
) -> None:
    publications.begin(whip.url)
    until(lambda: whip.frames, what="pictures")
    shown.hub.close()
    until(lambda: told.states()[-1] == "ended", what="its end")
    assert whip.methods() == ["POST", "DELETE"]


def test_a_token_goes_to_no_other_host(
    publications: Publications, told: Told, whip: WhipServer
) -> None:
    whip.location = whip.url.replace("127.0.0.1", "localhost") + "/resource-8"
    name = publications.begin(f"{whip.url}#token={SECRET}")["id"]
    until(lambda: "live" in told.states(), what="its peer")
    publications.end(name)
    assert whip.asked[1:] == [("DELETE", "/whip/resource-8", "")]


@pytest.mark.parametrize(("status", "state"), [(401, "failed"), (307, "failed"), (503, "retrying")])
def test_what_an_endpoint_refuses_is_said_and_tried_again_only_where_that_may_help(
    publications: Publications, told: Told, whip: WhipServer, status: int, state: str
) -> None:
    whip.answers_with = status
    publications.begin(whip.url)
    until(lambda: state in told.states(), what=state)
    detail = next(event["detail"] for event in told.events if event["state"] == state)
    assert f"answers {status} to an offer" in detail


@pytest.mark.parametrize(
    "change",
    [
        lambda answer: "no SDP",
        lambda answer: answer.replace("a=rtpmap", "a=nothing"),
        lambda answer: answer.replace("a=setup:active", "a=setup:nothing"),
    ],
)
def test_a_whip_endpoint_that_speaks_something_else_is_tried_again(
    publications: Publications,
    told: Told,
    whip: WhipServer,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[str], str],
) -> None:
    answer = whip._answer

    async def changed(offer: str) -> str:
        return change(await answer(offer))

    monkeypatch.setattr(whip, "_answer", changed)
    publications.begin(whip.url)
    until(lambda: "retrying" in told.states(), what="its refusal")
    assert "no SDP that can be used" in told.events[-1]["detail"]


# A session's.


def test_no_more_than_a_few_and_none_after_the_end(told: Told) -> None:
    publications = Publications(hub=lambda: None, tell=told.publish)
    for _ in range(MOST_PUBLICATIONS):
        publications.begin("rtmp://127.0.0.1/live")
    with pytest.raises(UserInputError, match="delete one"):
        publications.begin("rtmp://127.0.0.1/live")
    publications.close()
    with pytest.raises(UserInputError, match="has ended"):
        publications.begin("rtmp://127.0.0.1/live")
    assert not publications.end("nothing")


def test_publications_are_begun_listed_and_ended_by_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(GroupControl, "start", lambda self: None)
    monkeypatch.setattr(GroupControl, "runs", True)
    monkeypatch.setattr(GroupControl, "wait", lambda self: None)
    with idle_server(idle_settings(tmp_path)) as server, server.client() as client:
        name = server.sessions.create("a red circle", {}).record.id
        path = f"/v1/sessions/{name}/publications"
        begun = client.post(path, json={"url": f"rtmp://127.0.0.1/live/{SECRET}"})
        assert begun.status_code == 201
        view = begun.json()
        assert (view["url"], view["state"]) == ("rtmp://127.0.0.1/...", "connecting")
        assert client.get(path).json() == [view]
        session = client.get(f"/v1/sessions/{name}")
        assert session.json()["stats"]["publications"] == [view]
        assert client.delete(f"{path}/{view['id']}").status_code == 204
        assert client.delete(f"{path}/{view['id']}").status_code == 404
        refused = client.post(path, json={"url": f"ftp://a/{SECRET}"})
        assert refused.status_code == 422
        assert "give rtmp://" in refused.json()["detail"]
        assert client.post("/v1/sessions/none/publications", json={"url": "x"}).status_code == 404
        for answer in (begun, session, refused):
            assert SECRET not in answer.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--publish", f"ftp://a/{SECRET}"], "--publish: url: give rtmp://"),
        (["--publish", "rtmp://a/b", "--no-session"], "--no-session leaves out"),
        (["--publish", "rtmp://a/b"] * 5, "at most 4 times"),
    ],
)
def test_the_command_refuses_what_it_could_not_publish(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert SECRET not in said


def test_no_sender_outlives_the_tests() -> None:
    """Of this file's, each ended with its publication."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    if not children.exists():
        pytest.skip("this kernel does not list a process's children")
    for pid in children.read_text().split():
        with contextlib.suppress(FileNotFoundError):
            assert b"mux_process" not in Path(f"/proc/{pid}/cmdline").read_bytes()
