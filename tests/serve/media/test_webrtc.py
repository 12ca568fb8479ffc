"""A WHEP client, written from the draft, plays a session; whatever else comes is answered."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
from aiortc import RTCPeerConnection, RTCRtpReceiver, RTCSessionDescription

from scope_runners.serve.media import webrtc
from scope_runners.serve.media.encoder import Codec
from tests.serve.media.shown_hub import GREEN, RED, is_colour
from tests.serve.media.shown_server import ShownServer, shown_server

BOUND_S = 60.0
SDP = {"content-type": "application/sdp"}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ShownServer]:
    with shown_server(tmp_path, max_viewers=2) as served:
        yield served


class WhepClient:
    """An offer to receive, posted as SDP; the answer's resource is deleted at the end."""

    def __init__(
        self, served: ShownServer, *, codec: str = "", kinds: tuple[str, ...] = ("video",)
    ) -> None:
        self.url = f"{served.path}/whep"
        self.http = httpx.AsyncClient(base_url=served.server.url, timeout=BOUND_S)
        self.peer = RTCPeerConnection()
        self.resource = ""
        for kind in kinds:
            transceiver = self.peer.addTransceiver(kind, direction="recvonly")
            if codec:
                every: Any = RTCRtpReceiver.getCapabilities(kind)
                transceiver.setCodecPreferences(
                    [each for each in every.codecs if each.mimeType == codec]
                )
            if kind == "video":
                self.receiver = transceiver.receiver

    async def offer(self) -> str:
        await self.peer.setLocalDescription(await self.peer.createOffer())
        return str(self.peer.localDescription.sdp)

    async def play(self) -> str:
        """Returns the answer."""
        answer = await self.http.post(self.url, content=await self.offer(), headers=SDP)
        assert answer.status_code == 201, answer.text
        assert answer.headers["content-type"].startswith("application/sdp")
        self.resource = answer.headers["location"]
        await self.peer.setRemoteDescription(RTCSessionDescription(sdp=answer.text, type="answer"))
        return answer.text

    async def picture(self) -> Any:
        picture: Any = await asyncio.wait_for(self.receiver.track.recv(), BOUND_S)
        return picture.to_ndarray(format="rgb24")

    async def picture_of(self, colour: tuple[int, int, int]) -> None:
        """Returns once one has come."""
        async with asyncio.timeout(BOUND_S):
            while not is_colour(await self.picture(), colour):
                continue

    async def leave(self) -> None:
        assert (await self.http.delete(self.resource)).status_code == 200

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.peer.close()
        await self.http.aclose()


@pytest.mark.parametrize("codec", ["video/H264", "video/VP8"])
def test_a_whep_client_sees_what_is_shown_and_leaves(served: ShownServer, codec: str) -> None:
    async def watch() -> None:
        async with WhepClient(served, codec=codec) as client:
            answer = await client.play()
            assert codec.removeprefix("video/") in answer
            assert "a=sendonly" in answer
            await client.picture_of(RED)
            served.shown.colour = GREEN
            await client.picture_of(GREEN)
            assert served.shown.hub.num_viewers == 1
            await client.leave()

    asyncio.run(watch())
    served.nobody_watches()


def test_h264_is_chosen_where_both_are_offered_and_audio_that_is_not_there_is_refused(
    served: ShownServer,
) -> None:
    async def watch() -> None:
        async with WhepClient(served, kinds=("audio", "video")) as client:
            answer = await client.play()
            audio, video = answer.split("m=")[1:]
            assert "a=inactive" in audio
            assert video.index("H264") < video.find("VP8") % len(video)
            await client.picture_of(RED)
            await client.leave()

    asyncio.run(watch())


def test_who_lost_a_picture_gets_a_keyframe_of_the_one_encoder(
    served: ShownServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Codec] = []
    hub = served.shown.hub
    monkeypatch.setattr(hub, "ask_for_key", asked.append)

    async def watch() -> None:
        async with WhepClient(served, codec="video/H264") as client:
            await client.play()
            await client.picture_of(RED)
            (source,) = client.receiver.getSynchronizationSources()
            await client.receiver._send_rtcp_pli(source.source)
            async with asyncio.timeout(BOUND_S):
                while Codec.H264 not in asked:
                    await asyncio.sleep(0.05)
            await client.leave()

    asyncio.run(watch())


def test_what_is_no_offer_of_a_viewer_is_refused_by_sentence(served: ShownServer) -> None:
    async def ask() -> None:
        async with WhepClient(served) as client:
            client.peer.createDataChannel("control")
            offer, http, url = await client.offer(), client.http, client.url
            other = await http.post(url, content=offer, headers={"content-type": "text/plain"})
            assert other.status_code == 415
            async with WhepClient(served, kinds=("audio",)) as other_client:
                sounds = await other_client.offer()
            for text in bad_offers(offer, sounds):
                answer = await http.post(url, content=text, headers=SDP)
                assert answer.status_code == 422, (text, answer.text)
                assert answer.json()["detail"]
            nobody = await http.post("/v1/sessions/none/whep", content=offer, headers=SDP)
            assert nobody.status_code == 404
            trickle = await http.patch(f"{url}/none", content="a=candidate:", headers=SDP)
            assert (trickle.status_code, trickle.headers["allow"]) == (405, "DELETE")
            assert (await http.delete(f"{url}/none")).status_code == 404

    asyncio.run(ask())
    assert served.shown.hub.num_viewers == 0


def bad_offers(offer: str, of_sound: str) -> list[bytes]:
    """That name what a server could stumble over."""
    lines = offer.split("\r\n")
    texts = [
        *("", "v=0", "nonsense", "v=0\r\nm=video\r\n", of_sound),
        offer.replace("H264", "AV1X").replace("VP8", "VP9X"),
        offer.replace("a=setup:actpass", "a=setup:nothing"),
        "\r\n".join(each for each in lines if not each.startswith("a=ice-")),
        "\r\n".join(each for each in lines if not each.startswith("m=application")),
        offer.replace("a=mid:0\r\n", ""),
        "\r\n".join(each for each in lines if not each.startswith("a=fingerprint")),
        "\r\n".join(each for each in lines if not each.startswith("a=rtpmap")),
    ]
    return [*(each.encode() for each in texts), b"\xff\xfe\x00"]


def test_a_viewer_beyond_the_limit_is_refused_and_one_that_never_comes_makes_room(
    served: ShownServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webrtc, "CONNECT_S", 1.0)

    async def ask() -> None:
        async with WhepClient(served) as client:
            offer = await client.offer()
            for status in (201, 201, 503):  # the answers are not used: none of them connects
                answer = await client.http.post(client.url, content=offer, headers=SDP)
                assert answer.status_code == status, answer.text
            assert "--max-viewers" in answer.json()["detail"]
            async with asyncio.timeout(BOUND_S):
                while served.shown.hub.num_viewers:
                    await asyncio.sleep(0.05)
            await client.play()
            await client.picture_of(RED)
            await client.leave()

    asyncio.run(ask())
    served.nobody_watches()


def test_a_viewer_steers_and_hears_over_its_data_channel(served: ShownServer) -> None:
    async def watch() -> None:
        heard = asyncio.Queue[str]()
        async with WhepClient(served) as client:
            channel = client.peer.createDataChannel("control")
            channel.on("message", heard.put_nowait)
            await client.play()
            async with asyncio.timeout(BOUND_S):
                while channel.readyState != "open":
                    await asyncio.sleep(0.05)
                channel.send('{"kind": "nothing"}')
                while '"error"' not in await heard.get():
                    continue
            await client.leave()

    asyncio.run(watch())


def test_viewers_end_with_their_session(served: ShownServer) -> None:
    async def watch() -> None:
        async with WhepClient(served) as client:
            await client.play()
            await client.picture_of(RED)
            assert (await client.http.delete(served.path)).status_code == 204
            async with asyncio.timeout(BOUND_S):
                while client.peer.connectionState not in ("closed", "failed"):
                    await asyncio.sleep(0.05)

    asyncio.run(watch())
    served.nobody_watches()
