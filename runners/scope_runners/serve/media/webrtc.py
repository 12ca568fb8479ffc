"""A viewer over WebRTC gets the packets of a rendition as they are: none is encoded for it alone.

The handshake is WHEP's: the viewer offers, the answer has all candidates, and its URL ends it.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import av
from aiortc import (
    RTCConfiguration,
    RTCIceServer,
    RTCPeerConnection,
    RTCRtpSender,
)
from aiortc.mediastreams import MediaStreamError, MediaStreamTrack

from scope_contracts.errors import UserInputError
from scope_runners.serve.media.encoder import CLOCK, Codec
from scope_runners.serve.media.hub import MediaHub
from scope_runners.serve.media.negotiation import (
    CONNECT_S,
    apply_offer,
    close_peer,
    negotiating,
)
from scope_runners.serve.media.viewer import Viewer
from scope_runners.serve.settings import IceServer

_CODECS = {"video/H264": Codec.H264, "video/VP8": Codec.VP8}
_LOG = logging.getLogger(__name__)


class RenditionTrack(MediaStreamTrack):
    """The packets of one viewer."""

    kind = "video"

    def __init__(self) -> None:
        super().__init__()
        self.is_over = False
        """Whether the stream has ended, and not the peer."""
        self._viewer: asyncio.Future[Viewer] = asyncio.get_running_loop().create_future()

    def watch(self, viewer: Viewer) -> None:
        """Begin with what this viewer gets."""
        self._viewer.set_result(viewer)

    async def recv(self) -> Any:
        """The next packet, which aiortc sends as it is."""
        viewer = await asyncio.shield(self._viewer)
        encoded = await viewer.next()
        if encoded is None:
            self.is_over = True
            self.stop()
            raise MediaStreamError
        packet = av.Packet(encoded.data)
        packet.pts = packet.dts = encoded.time_90k
        packet.time_base = CLOCK
        return packet


class Peers:
    """The WebRTC viewers of one session; used on one event loop."""

    def __init__(self, ice_servers: tuple[IceServer, ...]) -> None:
        self._ice_servers = ice_of(ice_servers)
        self._peers: dict[str, RTCPeerConnection] = {}
        self._viewers: dict[str, Viewer] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def answer(
        self, hub: MediaHub, offer: str, on_channel: Callable[[Any], None]
    ) -> tuple[str, str]:
        """Answer a viewer's offer; returns the viewer's id and the answer.

        `on_channel` is given each data channel that the viewer opens.

        Raises:
            UserInputError: the offer cannot be used.
            TooManyViewersError: there are as many as may be.
        """
        peer = RTCPeerConnection(RTCConfiguration(iceServers=self._ice_servers))
        name = uuid.uuid4().hex
        async with negotiating(peer):
            viewer = await self._negotiate(peer, hub, offer)
        self._peers[name] = peer
        peer.on("datachannel", on_channel)
        self._watch(name, peer, viewer)
        return name, peer.localDescription.sdp

    async def _negotiate(self, peer: RTCPeerConnection, hub: MediaHub, offer: str) -> Viewer:
        track = RenditionTrack()
        transceiver = peer.addTransceiver(track, direction="sendonly")
        prefer_ours(transceiver)
        await apply_offer(peer, offer)
        if transceiver.mid is None:
            raise UserInputError("the offer has no video to receive; offer recvonly video")
        await peer.setLocalDescription(await peer.createAnswer())
        codec = codec_of(transceiver)
        if codec is None:
            raise UserInputError("the offer has neither H.264 nor VP8; offer one of them")
        viewer = hub.join(codec, asyncio.get_running_loop())
        use_requests(transceiver, hub, codec)
        track.watch(viewer)
        return viewer

    def _watch(self, name: str, peer: RTCPeerConnection, viewer: Viewer) -> None:
        """Close it when it is gone, or has never come."""
        connected = asyncio.Event()

        @peer.on("connectionstatechange")
        async def changed() -> None:
            if peer.connectionState == "connected":
                connected.set()
            elif peer.connectionState in ("failed", "closed"):
                connected.set()
                viewer.leave()
                await self.close(name)

        async def bound() -> None:
            try:
                await asyncio.wait_for(connected.wait(), CONNECT_S)
            except TimeoutError:
                _LOG.info("viewer %s has not connected within %g s", name, CONNECT_S)
                viewer.leave()
                await self.close(name)

        task = asyncio.create_task(bound())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._viewers[name] = viewer

    async def close(self, name: str) -> bool:
        """End a viewer; False where there is none of that name."""
        peer = self._peers.pop(name, None)
        viewer = self._viewers.pop(name, None) if peer is not None else None
        if viewer is not None:
            viewer.leave()
        if peer is not None:
            await close_peer(peer)
        return peer is not None

    async def close_all(self) -> None:
        """End all viewers."""
        for name in list(self._peers):
            await self.close(name)


def ice_of(servers: tuple[IceServer, ...]) -> list[RTCIceServer]:
    """As aiortc takes them."""
    return [
        RTCIceServer(
            urls=each.url, username=each.username or None, credential=each.credential or None
        )
        for each in servers
    ]


def prefer_ours(transceiver: Any) -> None:
    """Negotiate H.264, else VP8, and nothing else."""
    capabilities = RTCRtpSender.getCapabilities("video").codecs
    ours = [each for name in _CODECS for each in capabilities if each.mimeType == name]
    transceiver.setCodecPreferences(ours)


def codec_of(transceiver: Any) -> Codec | None:
    """What was negotiated; None where that is none of ours."""
    return _CODECS.get(transceiver._codecs[0].mimeType) if transceiver._codecs else None


def use_requests(transceiver: Any, hub: MediaHub, codec: Codec) -> None:
    """Whoever lost a packet asks for a keyframe; aiortc would ask an encoder of its own."""
    transceiver.sender._send_keyframe = partial(hub.ask_for_key, codec)
