"""A stream is sent to a WHIP endpoint as packets of a rendition: none is encoded for it alone."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

import httpx
from aiortc import (
    RTCConfiguration,
    RTCIceServer,
    RTCPeerConnection,
    RTCRtpTransceiver,
    RTCSessionDescription,
)

from scope_runners.serve.media.hub import MediaHub
from scope_runners.serve.media.negotiation import CONNECT_S, close_peer
from scope_runners.serve.media.publish_errors import PublishError, RefusedError
from scope_runners.serve.media.publish_target import Target
from scope_runners.serve.media.viewer import Viewer
from scope_runners.serve.media.webrtc import RenditionTrack, codec_of, prefer_ours, use_requests

_ANSWER_S = 15.0
_END_S = 3.0
_MOST_ANSWER = 2**18
_GONE = "the endpoint's WebRTC peer is gone"
_TRANSIENT = (404, 408, 409, 429)
"""Of those below 500: another time they may be answered otherwise."""


async def send_by_whip(
    target: Target,
    hub: MediaHub,
    ice_servers: list[RTCIceServer],
    on_live: Callable[[], None],
) -> None:
    """Send until the stream ends.

    Raises:
        PublishError: the endpoint is not there, or is gone.
        RefusedError: it does not take this stream.
    """
    peer = RTCPeerConnection(RTCConfiguration(iceServers=ice_servers))
    track, states = RenditionTrack(), asyncio.Queue[str]()
    peer.on("connectionstatechange", lambda: states.put_nowait(peer.connectionState))
    track.on("ended", lambda: states.put_nowait("ended"))
    transceiver = peer.addTransceiver(track, direction="sendonly")
    prefer_ours(transceiver)
    async with httpx.AsyncClient(timeout=_ANSWER_S) as client:
        endpoint = _Endpoint(client=client, target=target)
        resource, viewer = "", None
        try:
            await peer.setLocalDescription(await peer.createOffer())
            answer, resource = await endpoint.offer(peer.localDescription.sdp)
            await _take(peer, answer)
            await _until(states, "connected", within_s=CONNECT_S)
            viewer = _joined(transceiver, hub)
            track.watch(viewer)
            on_live()
            await _until(states, "ended", within_s=None)
            if not track.is_over:  # aiortc ends the track of a peer that is gone
                raise PublishError(_GONE)
        finally:
            if viewer is not None:
                viewer.leave()
            await _quietly(endpoint.leave(resource))
            await close_peer(peer)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Endpoint:
    client: httpx.AsyncClient
    target: Target

    async def offer(self, offer: str) -> tuple[str, str]:
        """The answer, and the URL that ends it."""
        headers = {"content-type": "application/sdp", **self._credentials(self.target.url)}
        try:
            async with asyncio.timeout(_ANSWER_S):
                async with self.client.stream(
                    "POST", self.target.url, content=offer, headers=headers
                ) as answer:
                    body = await _body(answer)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            raise PublishError(f"the endpoint cannot be reached ({_kind(error)})") from None
        status = answer.status_code
        if status == 201:
            location = answer.headers.get("location", "")
            return body, urljoin(self.target.url, location) if location else ""
        sentence = f"the endpoint answers {status} to an offer"
        if status >= 500 or status in _TRANSIENT:
            raise PublishError(sentence)
        raise RefusedError(f"{sentence}; check URL and token")

    async def leave(self, resource: str) -> None:
        if resource:
            await self.client.delete(resource, headers=self._credentials(resource))

    def _credentials(self, url: str) -> dict[str, str]:
        """For the endpoint alone, and not for another host that it names."""
        ours, theirs = urlsplit(self.target.url), urlsplit(url)
        if not self.target.token or ours[:2] != theirs[:2]:
            return {}
        return {"authorization": f"Bearer {self.target.token}"}


async def _body(answer: httpx.Response) -> str:
    body = b""
    async for part in answer.aiter_bytes():
        body += part
        if len(body) > _MOST_ANSWER:
            raise PublishError("the endpoint's answer is too long to be one")
    return body.decode(errors="replace")


async def _take(peer: RTCPeerConnection, answer: str) -> None:
    try:
        await peer.setRemoteDescription(RTCSessionDescription(sdp=answer, type="answer"))
    except Exception as error:  # aiortc has errors of any kind for lines it did not expect
        raise PublishError("the endpoint's answer is no SDP that can be used") from error


def _joined(transceiver: RTCRtpTransceiver, hub: MediaHub) -> Viewer:
    codec = codec_of(transceiver)
    if codec is None:
        raise RefusedError("the endpoint takes neither H.264 nor VP8")
    use_requests(transceiver, hub, codec)
    return hub.join(codec, asyncio.get_running_loop(), is_publication=True)


async def _until(states: asyncio.Queue[str], wanted: str, *, within_s: float | None) -> None:
    """Raises `PublishError`: the peer has failed or closed before, or it takes too long."""
    try:
        async with asyncio.timeout(within_s):
            while (state := await states.get()) != wanted:
                if state in ("failed", "closed"):
                    raise PublishError(_GONE)
    except TimeoutError:
        raise PublishError(
            f"the endpoint's WebRTC peer has not connected within {within_s:g} s"
        ) from None


async def _quietly(end: Awaitable[None]) -> None:
    """Say goodbye to who may be gone."""
    with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL, TimeoutError):
        async with asyncio.timeout(_END_S):
            await end


def _kind(error: Exception) -> str:
    """Without what its text may hold."""
    return type(error).__name__
