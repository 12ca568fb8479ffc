"""A stream goes to a media server that others watch: its packets as they are, over and over until
it is told to end, and never at the stream's cost."""

import asyncio
import contextlib
import sys
import urllib.request
import uuid
from collections.abc import Callable
from enum import StrEnum
from typing import Any
from urllib.error import URLError
from urllib.parse import urljoin, urlsplit, urlunsplit

from aiortc import RTCConfiguration, RTCIceServer, RTCPeerConnection, RTCSessionDescription

from scope_contracts.errors import UserInputError
from scope_runners.serve.media.encoder import Codec
from scope_runners.serve.media.hub import MediaHub
from scope_runners.serve.media.mux_process import HEAD, NO_PROTOCOL
from scope_runners.serve.media.viewer import Viewer
from scope_runners.serve.media.webrtc import RenditionTrack, codec_of, prefer_ours, use_requests

ANSWER_S = 10.0
"""How long the other side may take to answer, or to read."""
LONGEST_BACKOFF_S = 30.0
_FORMATS = {"rtmp": "flv", "rtmps": "flv", "srt": "mpegts", "rtsp": "rtsp", "rtsps": "rtsp"}
_WHIP = ("http", "https")


class PublicationState(StrEnum):
    """What becomes of a publication."""

    CONNECTING = "connecting"
    LIVE = "live"
    RETRYING = "retrying"
    FAILED = "failed"
    """No other try can succeed."""
    ENDED = "ended"


class PublishError(Exception):
    """The other side is not there, refuses, or has left."""


class Publication:
    """One stream to one URL; used on one event loop."""

    def __init__(
        self,
        hub: MediaHub,
        url: str,
        *,
        ice_servers: list[RTCIceServer],
        tell: Callable[..., int],
    ) -> None:
        """Raises `UserInputError`: the URL is none that can be published to."""
        self.id = uuid.uuid4().hex[:12]
        place = urlsplit(url)
        if place.scheme not in (*_FORMATS, *_WHIP) or not place.hostname:
            kinds = ", ".join(f"{name}://" for name in (*_FORMATS, *_WHIP))
            raise UserInputError(f"url: give one of {kinds} with a host; http is WHIP")
        self._url, self._place, self._hub = url, place, hub
        self._ice_servers, self._tell = ice_servers, tell
        self.state, self.detail = PublicationState.CONNECTING, ""
        self.num_packets = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def shown_url(self) -> str:
        """Without what may be a secret: a path, a query, a name, a fragment."""
        port = f":{self._place.port}" if self._place.port else ""
        return f"{self._place.scheme}://{self._place.hostname}{port}/..."

    def told(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "id": self.id,
            "url": self.shown_url,
            "state": str(self.state),
            "detail": self.detail,
            "packets": self.num_packets,
        }

    def start(self) -> None:
        """Begin; it tries again until it is ended."""
        self._task = asyncio.create_task(self._run())

    async def end(self) -> None:
        """End it, within `ANSWER_S`. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        self._become(PublicationState.ENDED, "")

    async def _run(self) -> None:
        backoff_s = 1.0
        while True:
            sent_before = self.num_packets
            try:
                await (self._whip() if self._place.scheme in _WHIP else self._mux())
                self._become(PublicationState.ENDED, "the stream has ended")
                return
            except UserInputError as error:
                self._become(PublicationState.FAILED, str(error))
                return
            except (PublishError, OSError, URLError, ValueError) as error:
                backoff_s = 1.0 if self.num_packets > sent_before else backoff_s * 2
                backoff_s = min(backoff_s, LONGEST_BACKOFF_S)
                self._become(PublicationState.RETRYING, f"{error}; again in {backoff_s:g} s")
            await asyncio.sleep(backoff_s)

    def _become(self, state: PublicationState, detail: str) -> None:
        if (state, detail) != (self.state, self.detail):
            self.state, self.detail = state, detail
            self._tell("publication", **self.told())

    async def _mux(self) -> None:
        """By one of FFmpeg's muxers, in a process of its own, which is killed where it is stuck."""
        viewer = self._hub.join(Codec.H264, asyncio.get_running_loop())
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "scope_runners.serve.media.mux_process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        feeding = asyncio.create_task(self._feed(process, viewer))
        try:
            await self._count(process)
            why = await self._end_of(process)
            if process.returncode == NO_PROTOCOL:
                raise UserInputError(
                    f"this PyAV was built without {self._place.scheme}; build one that has it, or "
                    "publish by rtmp or WHIP"
                )
            if process.returncode:
                raise PublishError(f"the other side is not there, or has left ({why})")
        finally:
            viewer.leave()
            feeding.cancel()
            await asyncio.wait({feeding})
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _feed(self, process: asyncio.subprocess.Process, viewer: Viewer) -> None:
        """Packets from the first keyframe on; its end is the end of the input."""
        pipe = process.stdin
        assert pipe is not None, "made with one"
        pipe.write(f"{self._url}\n{_FORMATS[self._place.scheme]}\n".encode())
        with contextlib.suppress(ConnectionError):  # it ended, which `_count` sees
            while (encoded := await viewer.next()) is not None:
                head = HEAD.pack(len(encoded.data), encoded.time_90k, encoded.is_key)
                pipe.write(head + encoded.data)
                await pipe.drain()
            pipe.close()

    async def _count(self, process: asyncio.subprocess.Process) -> None:
        """Until it ends. Raises `PublishError` where nothing was taken for `ANSWER_S`."""
        pipe = process.stdout
        assert pipe is not None, "made with one"
        while True:
            try:
                muxed = await asyncio.wait_for(pipe.read(4096), ANSWER_S)
            except TimeoutError:
                raise PublishError(f"it has taken nothing for {ANSWER_S:g} s") from None
            if not muxed:
                return
            self.num_packets += len(muxed)
            self._become(PublicationState.LIVE, "")

    async def _end_of(self, process: asyncio.subprocess.Process) -> str:
        """What it said."""
        assert process.stderr is not None, "made with one"
        said = await process.stderr.read(4096)
        await process.wait()
        return said.decode(errors="replace").strip().splitlines()[-1] if said.strip() else "closed"

    async def _whip(self) -> None:
        """As a WHIP client: offer, answer, and a resource that is deleted at the end."""
        peer = RTCPeerConnection(RTCConfiguration(iceServers=self._ice_servers))
        viewer: Viewer | None = None
        resource = ""
        gone = asyncio.Event()

        @peer.on("connectionstatechange")
        async def changed() -> None:
            if peer.connectionState in ("failed", "closed"):
                gone.set()

        try:
            track = RenditionTrack(on_packet=self._sent)
            transceiver = peer.addTransceiver(track, direction="sendonly")
            prefer_ours(transceiver)
            await peer.setLocalDescription(await peer.createOffer())
            offer = peer.localDescription.sdp
            resource, answer = await asyncio.to_thread(self._ask, "POST", self._target, offer)
            await peer.setRemoteDescription(RTCSessionDescription(sdp=answer, type="answer"))
            codec = codec_of(transceiver)
            if codec is None:
                raise PublishError("it takes neither H.264 nor VP8")
            viewer = self._hub.join(codec, asyncio.get_running_loop())
            use_requests(transceiver, self._hub, codec)
            track.watch(viewer)
            await gone.wait()
            raise PublishError("the connection is gone")
        finally:
            if viewer is not None:
                viewer.leave()
            await peer.close()
            if resource:
                with contextlib.suppress(PublishError, OSError):
                    await asyncio.to_thread(self._ask, "DELETE", resource, "")

    def _sent(self) -> None:
        self.num_packets += 1
        self._become(PublicationState.LIVE, "")

    @property
    def _target(self) -> str:
        """The URL as it is asked for: a name and a fragment stay here."""
        port = f":{self._place.port}" if self._place.port else ""
        host = f"{self._place.hostname}{port}"
        return urlunsplit((self._place.scheme, host, self._place.path, self._place.query, ""))

    def _ask(self, method: str, url: str, offer: str) -> tuple[str, str]:
        """The resource and the answer. Raises `PublishError`."""
        headers = {"content-type": "application/sdp"} if offer else {}
        token = self._place.password or self._place.fragment.removeprefix("token=")
        if token:
            headers["authorization"] = f"Bearer {token}"
        request = urllib.request.Request(
            url, data=offer.encode() if offer else None, headers=headers, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                location = answer.headers.get("location", "")
                return urljoin(url, location) if location else "", answer.read().decode()
        except URLError as error:
            raise PublishError(f"it does not answer as a WHIP server ({error})") from error
