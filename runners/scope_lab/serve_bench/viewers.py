"""Viewers of a session, in a process of their own: MJPEG, fragmented MP4, WebRTC, and some that
never read. `python -m scope_lab.serve_bench.viewers URL BASE NUM NUM_SILENT`.

Prints how many bytes and pictures came once its standard input ends.
"""

import asyncio
import base64
import contextlib
import json
import os
import sys
import urllib.request
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

from aiortc import RTCPeerConnection, RTCSessionDescription
from aiortc.contrib.media import MediaBlackhole

WEBRTC = 4
"""Of the viewers that read: each decodes, which costs more than to serve it."""


@dataclass(slots=True)
class Counts:
    """What came."""

    mjpeg_bytes: int = 0
    fmp4_bytes: int = 0
    webrtc_packets: int = 0


async def main(url: str, base: str, num: int, num_silent: int) -> None:
    """Watch until standard input ends."""
    counts, place = Counts(), urlsplit(url)
    host, port = str(place.hostname), int(place.port or 80)
    tasks = []
    silent = [
        await _begun(
            host, port, f"{base}/stream.{'mjpeg' if n % 2 else 'fmp4'}", is_socket=not n % 2
        )
        for n in range(num_silent)
    ]
    peers = [await _peer(url + base) for _ in range(min(WEBRTC, num))]
    for number in range(num - len(peers)):
        is_socket = number % 2 == 0
        tasks.append(asyncio.create_task(_read(host, port, base, counts, is_socket=is_socket)))
    print("watching", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()
    for peer in peers:
        for receiver in peer.getReceivers():
            stats = await receiver.getStats()
            for each in stats.values():
                counts.webrtc_packets += each.packetsReceived if each.type == "inbound-rtp" else 0
        await peer.close()
    for _, writer in silent:
        writer.close()
    print(json.dumps(asdict(counts)), flush=True)


async def _read(host: str, port: int, base: str, counts: Counts, *, is_socket: bool) -> None:
    path = f"{base}/stream.{'fmp4' if is_socket else 'mjpeg'}"
    reader, writer = await _begun(host, port, path, is_socket=is_socket)
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            if is_socket:
                counts.fmp4_bytes += len(data)
            else:
                counts.mjpeg_bytes += len(data)
    writer.close()


async def _begun(
    host: str, port: int, path: str, *, is_socket: bool
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has asked for a stream."""
    reader, writer = await asyncio.open_connection(host, port)
    head = f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\n"
    if is_socket:
        key = base64.b64encode(os.urandom(16)).decode()
        head += "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        head += f"Sec-WebSocket-Key: {key}\r\n"
    writer.write(f"{head}\r\n".encode())
    await writer.drain()
    return reader, writer


async def _peer(session_url: str) -> RTCPeerConnection:
    peer, sink = RTCPeerConnection(), MediaBlackhole()
    peer.addTransceiver("video", direction="recvonly")
    peer.on("track", sink.addTrack)
    await peer.setLocalDescription(await peer.createOffer())
    offer = peer.localDescription.sdp.encode()

    def ask() -> str:
        request = urllib.request.Request(
            f"{session_url}/whep", data=offer, headers={"content-type": "application/sdp"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return str(answer.read().decode())

    answer = await asyncio.to_thread(ask)
    await peer.setRemoteDescription(RTCSessionDescription(sdp=answer, type="answer"))
    await sink.start()
    return peer


if __name__ == "__main__":
    url, base, num, num_silent = sys.argv[1:]
    asyncio.run(main(url, base, int(num), int(num_silent)))
