"""A stream goes to a media server that others watch: its packets as they are, over and over until
it is told to end, and never at the stream's cost."""

import asyncio
import contextlib
import urllib.request
import uuid
from collections.abc import Callable
from enum import StrEnum
from typing import Any, TypeVar
from urllib.error import URLError
from urllib.parse import urljoin, urlsplit, urlunsplit

import av
from aiortc import RTCConfiguration, RTCIceServer, RTCPeerConnection, RTCSessionDescription

from scope_contracts.errors import UserInputError
from scope_rt.disk import DaemonExecutor
from scope_runners.serve.media.encoder import Codec
from scope_runners.serve.media.hub import MediaHub
from scope_runners.serve.media.muxing import packet_for, stream_for
from scope_runners.serve.media.viewer import Viewer
from scope_runners.serve.media.webrtc import RenditionTrack, codec_of, prefer_ours, use_requests

ANSWER_S = 10.0
"""How long the other side may take to answer, or to read."""
LONGEST_BACKOFF_S = 30.0
_FORMATS = {"rtmp": "flv", "rtmps": "flv", "srt": "mpegts", "rtsp": "rtsp", "rtsps": "rtsp"}
_WHIP = ("http", "https")

T = TypeVar("T")


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
            except av.error.ProtocolNotFoundError:
                why = f"this PyAV was built without {self._place.scheme}; build one that has it"
                self._become(PublicationState.FAILED, f"{why}, or publish by rtmp or WHIP")
                return
            except (PublishError, av.FFmpegError, OSError, URLError, ValueError) as error:
                why = type(error).__name__ if isinstance(error, av.FFmpegError) else str(error)
                backoff_s = 1.0 if self.num_packets > sent_before else backoff_s * 2
                backoff_s = min(backoff_s, LONGEST_BACKOFF_S)
                self._become(PublicationState.RETRYING, f"{why}; again in {backoff_s:g} s")
            await asyncio.sleep(backoff_s)

    def _become(self, state: PublicationState, detail: str) -> None:
        if (state, detail) != (self.state, self.detail):
            self.state, self.detail = state, detail
            self._tell("publication", **self.told())

    async def _mux(self) -> None:
        """By one of FFmpeg's muxers, on a thread of its own: what blocks may never come back."""
        worker = DaemonExecutor("publish")
        viewer = self._hub.join(Codec.H264, asyncio.get_running_loop())
        container: Any = None
        try:
            encoded = key = await viewer.next()
            if key is None:
                return
            container = await _within(worker, self._opened)
            stream = await _within(worker, stream_for, container, key)
            await _within(worker, container.start_encoding)
            while encoded is not None:
                packet = packet_for(stream, encoded, after_90k=key.time_90k)
                await _within(worker, container.mux_one, packet)
                self._sent()
                encoded = await viewer.next()
        finally:
            viewer.leave()
            if container is not None:
                with contextlib.suppress(PublishError):
                    await _within(worker, _closed, container)
            worker.shutdown()

    def _opened(self) -> Any:
        scheme = self._place.scheme
        options = {"rtsp_transport": "tcp"} if scheme.startswith("rtsp") else {"flush_packets": "1"}
        return av.open(self._url, "w", format=_FORMATS[scheme], options=options)

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


async def _within(worker: DaemonExecutor, call: Callable[..., T], *arguments: object) -> T:
    """What a call on the worker's thread returns; raises `PublishError` after `ANSWER_S`."""
    future = worker.submit(call, *arguments)
    try:
        return await asyncio.wait_for(asyncio.wrap_future(future), ANSWER_S)
    except TimeoutError:
        raise PublishError(f"it has taken nothing for {ANSWER_S:g} s") from None


def _closed(container: Any) -> None:
    with contextlib.suppress(av.FFmpegError, OSError, ValueError):
        container.close()
