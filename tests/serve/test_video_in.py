"""Pictures of a file or a camera are sampled newest first, and a stream that is given them shows
them."""

import asyncio
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
import pytest
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription, VideoStreamTrack
from numpy.typing import NDArray
from PIL import Image

from scope_contracts.errors import UserInputError
from scope_rt.control.motion_noise import MotionNoise
from scope_runners.serve.given_video import NOTHING, GivenVideo
from scope_runners.serve.media import video_in
from scope_runners.serve.media.newest_frames import NewestFrames
from scope_runners.serve.media.video_in import CameraSource, FileSource
from scope_runners.serve.messages import RankReady
from tests.serve.running_server import RunningServer, running_server, until

BOUND_S = 30.0
Picture = NDArray[np.uint8]


def plain(colour: tuple[int, int, int], size: tuple[int, int] = (48, 64)) -> Picture:
    return np.full((*size, 3), colour, np.uint8)


def frame(picture: Picture) -> av.VideoFrame:
    return av.VideoFrame.from_ndarray(picture, format="rgb24")


def a_video(path: Path, *, num_frames: int = 24, size: tuple[int, int] = (96, 128)) -> Path:
    """Blue on the left, green on the right."""
    picture = plain((20, 30, 200), size)
    picture[:, size[1] // 2 :] = (20, 180, 40)
    with av.open(str(path), "w", format="mp4") as container:
        stream: Any = container.add_stream("libx264", rate=Fraction(24))
        stream.width, stream.height, stream.pix_fmt = size[1], size[0], "yuv420p"
        for _ in range(num_frames):
            container.mux(stream.encode(frame(picture)))
        container.mux(stream.encode())
    return path


def test_the_newest_are_kept_at_the_streams_own_rate() -> None:
    kept = NewestFrames(fps=16, width=8, height=8, most=4)
    assert kept.newest(4) is None
    for number in range(48):  # 48 a second
        kept.add(frame(plain((number * 5, 0, 0))), number / 48)
    newest = kept.newest(4)
    assert newest is not None
    assert newest.shape == (4, 8, 8, 3)
    steps = np.diff(newest[:, 0, 0, 0].astype(int)) / 5
    assert steps.round().tolist() == [3, 3, 3]
    assert newest[-1, 0, 0, 0] / 5 > 43


def test_a_slow_source_and_one_that_begins_anew_go_on() -> None:
    kept = NewestFrames(fps=16, width=8, height=8, most=32)
    for number in range(5):
        kept.add(frame(plain((number, 0, 0))), float(number))
    for number in range(5):
        kept.add(frame(plain((100 + number, 0, 0))), float(number))
    newest = kept.newest(32)
    assert newest is not None
    assert len(newest) == 10


def test_pictures_cover_the_streams_size_and_are_cut_around_their_middle() -> None:
    kept = NewestFrames(fps=16, width=16, height=16, most=1)
    picture = plain((255, 0, 0), (32, 96))
    picture[:, 32:64] = (0, 255, 0)
    kept.add(frame(picture), 0.0)
    newest = kept.newest(1)
    assert newest is not None
    assert (newest[0, :, 2:-2, 1] > 200).all(), "the middle third is what is left"


def test_a_file_plays_in_a_loop_and_its_copy_goes_with_it(tmp_path: Path) -> None:
    path = a_video(tmp_path / "clip.mp4", num_frames=6)
    kept = NewestFrames(fps=24, width=16, height=16, most=200)
    source = FileSource(path, kept, name="file")
    until(lambda: kept.num_seen > 13, what="the third round")
    source.close()
    assert not path.exists()


def test_what_is_no_video_is_refused_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "clip"
    path.write_bytes(b"no video at all")
    kept = NewestFrames(fps=24, width=16, height=16, most=2)
    with pytest.raises(UserInputError, match="is no video that can be read"):
        FileSource(path, kept, name="file")


@pytest.mark.parametrize("kind", ["a list of other files", "a picture of too many pixels"])
def test_an_input_that_would_cost_the_server_more_than_itself_is_refused(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "input"
    if kind == "a list of other files":
        a_video(tmp_path / "secret.mp4", num_frames=2)
        path.write_text("ffconcat version 1.0\nfile secret.mp4\n")
    else:
        Image.new("L", (9000, 9000)).save(path, "PNG")
    kept = NewestFrames(fps=24, width=16, height=16, most=2)
    with pytest.raises(UserInputError, match="is no video that can be read") as refused:
        FileSource(path, kept, name="file")
    assert str(tmp_path) not in str(refused.value)


def test_a_single_picture_is_kept_and_read_no_more(tmp_path: Path) -> None:
    path = tmp_path / "input"
    Image.fromarray(plain((200, 30, 30), (40, 40))).save(path, "PNG")
    kept = NewestFrames(fps=24, width=16, height=16, most=2)
    source = FileSource(path, kept, name="file")
    until(lambda: not source._thread.is_alive(), what="its thread's end")
    newest = source.newest(2)
    assert newest is not None
    assert (newest[-1, 8, 8] == (200, 30, 30)).all()
    source.close()


def test_pictures_without_times_play_at_the_rate_of_their_file(tmp_path: Path) -> None:
    path, times_s = tmp_path / "input", list[float]()
    with av.open(str(path), "w", format="h264") as container:
        stream: Any = container.add_stream("libx264", rate=Fraction(25))
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for number in range(5):
            container.mux(stream.encode(frame(plain((number, 0, 0), (32, 32)))))
        container.mux(stream.encode())

    class Timed(NewestFrames):
        def add(self, picture: av.VideoFrame, time_s: float) -> None:
            times_s.append(time_s)

    source = FileSource(path, Timed(fps=24, width=16, height=16, most=2), name="file")
    until(lambda: len(times_s) > 11, what="the second round's end")
    source.close()
    once = [number / 25 for number in range(5)]
    assert times_s[:11] == pytest.approx([0.0, *once, *once])


class Still:
    """A source of one picture."""

    name = "still"

    def __init__(self) -> None:
        self.is_closed = False

    def newest(self, num_frames: int) -> Picture:
        return plain((1, 2, 3), (8, 8))[None]

    def close(self) -> None:
        self.is_closed = True


READY = RankReady(
    attempt=0,
    fps=16,
    height=8,
    width=8,
    plan="single",
    tp=1,
    world_size=1,
    max_in_flight=1,
    chunk_frames=12,
    cache_bytes=0,
    next_chunk=0,
    resumed=False,
)


def test_rank0_is_told_of_pictures_with_each_chunk_and_once_that_there_are_none() -> None:
    video, source, other = GivenVideo(), Still(), Still()
    assert video.next(READY) is None
    video.begin(source, MotionNoise(low=0.2, high=0.4))
    for _ in range(2):
        given = video.next(READY)
        assert given is not None
        assert given[0].num_frames == 1
        assert given[0].noise_scale == pytest.approx(0.4)
    video.begin(other, MotionNoise(low=0.2, high=0.4))
    assert source.is_closed
    video.end(source)
    assert video.told is not None, "another has taken its place"
    video.end()
    assert other.is_closed
    assert video.next(READY) == (NOTHING, b"")
    assert video.next(READY) is None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("input"), "--prompt", "a red circle") as server:
        server.live()
        yield server


def shown_colours(server: RunningServer, session_id: str) -> tuple[Picture, Picture]:
    """Mean colours of the left and the right half of what is shown."""
    url = f"{server.url}/v1/sessions/{session_id}/stream.mjpeg"
    with httpx.stream("GET", url, timeout=30) as answer:
        data = b""
        for part in answer.iter_bytes():
            data += part
            start, end = data.find(b"\xff\xd8"), data.find(b"\xff\xd9")
            if start >= 0 and end > start:
                break
    with av.open(__import__("io").BytesIO(data[start : end + 2]), format="jpeg_pipe") as container:
        picture = next(container.decode(video=0)).to_ndarray(format="rgb24")
    half = picture.shape[1] // 2
    left: Picture = picture[:, : half // 2].mean((0, 1))
    right: Picture = picture[:, half + half // 2 :].mean((0, 1))
    return left, right


def is_the_clip(server: RunningServer, session_id: str) -> bool:
    left, right = shown_colours(server, session_id)
    return bool(left[2] > left[1] + 40 and right[1] > right[2] + 40)


def test_a_stream_shows_the_file_that_it_is_given_until_it_is_taken_away(
    server: RunningServer, tmp_path: Path
) -> None:
    session_id = server.live()["id"]
    assert not is_the_clip(server, session_id)
    path = f"{server.url}/v1/sessions/{session_id}/input"
    video = a_video(tmp_path / "clip.mp4").read_bytes()
    answer = httpx.post(f"{path}?noise_low=0.05&noise_high=0.05", content=video, timeout=60)
    assert answer.status_code == 201, answer.text
    until(lambda: is_the_clip(server, session_id), what="the clip on screen")
    told = server.session()["stats"]["input"]
    assert told["source"] == "file"
    assert httpx.delete(path, timeout=30).status_code == 204
    until(lambda: not is_the_clip(server, session_id), what="the prompt on screen")
    assert server.session()["stats"]["input"] is None
    assert not list((server.folder / "serve" / "sessions" / session_id).glob("input-*"))


def test_a_body_that_is_no_video_is_refused_and_leaves_nothing(server: RunningServer) -> None:
    session_id = server.live()["id"]
    path = f"{server.url}/v1/sessions/{session_id}/input"
    answer = httpx.post(path, content=b"nothing", timeout=30)
    assert answer.status_code == 422
    assert "no video" in answer.json()["detail"]
    assert httpx.post(f"{path}?noise_low=2", content=b"x", timeout=30).status_code == 422
    assert not list((server.folder / "serve" / "sessions" / session_id).glob("input-*"))


class Camera(VideoStreamTrack):
    """A camera that sees the colours of the clip."""

    async def recv(self) -> Any:
        pts, time_base = await self.next_timestamp()
        picture = plain((20, 30, 200), (96, 128))
        picture[:, 64:] = (20, 180, 40)
        seen = frame(picture)
        seen.pts, seen.time_base = pts, time_base
        return seen


def test_a_camera_is_sent_by_whip_and_seen(server: RunningServer) -> None:
    session_id = server.live()["id"]

    async def send() -> None:
        peer = RTCPeerConnection()
        peer.addTransceiver(Camera(), direction="sendonly")
        await peer.setLocalDescription(await peer.createOffer())
        url = f"{server.url}/v1/sessions/{session_id}/whip?noise_low=0.05&noise_high=0.05"
        async with httpx.AsyncClient(timeout=30) as client:
            headers = {"content-type": "application/sdp"}
            answer = await client.post(url, content=peer.localDescription.sdp, headers=headers)
            assert answer.status_code == 201, answer.text
            await peer.setRemoteDescription(RTCSessionDescription(sdp=answer.text, type="answer"))
            for _ in range(300):
                if await asyncio.to_thread(is_the_clip, server, session_id):
                    break
                await asyncio.sleep(0.1)
            else:
                raise AssertionError("the camera is not on screen")
            assert (await client.delete(server.url + answer.headers["location"])).status_code == 204
        await peer.close()

    asyncio.run(send())
    until(lambda: not is_the_clip(server, session_id), what="the prompt on screen")


def test_a_camera_that_is_taken_away_is_told_to_stop() -> None:
    """By a file in its place, the end of its session, or whatever else gives the stream no more of
    its pictures: what it sends would be decoded as long as its page is open."""

    async def send() -> str:
        peer, video = RTCPeerConnection(), GivenVideo()
        peer.addTransceiver(Camera(), direction="sendonly")
        await peer.setLocalDescription(await peer.createOffer())
        frames = NewestFrames(fps=16, width=64, height=48, most=4)
        source = CameraSource(frames, on_end=video.end)
        answer = await source.answer(peer.localDescription.sdp, RTCConfiguration(iceServers=[]))
        video.begin(source, MotionNoise(low=0.1, high=0.1))
        await peer.setRemoteDescription(RTCSessionDescription(sdp=answer, type="answer"))
        async with asyncio.timeout(BOUND_S):
            while peer.connectionState != "connected" or source.newest(1) is None:
                await asyncio.sleep(0.05)
            await asyncio.to_thread(video.end)
            while peer.connectionState not in ("closed", "failed"):
                await asyncio.sleep(0.05)
        state = peer.connectionState
        await peer.close()
        return state

    assert asyncio.run(send()) == "closed"


def test_a_camera_that_never_connects_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_in, "CONNECT_S", 0.2)

    async def offer() -> None:
        peer, ended = RTCPeerConnection(), asyncio.Event()
        peer.addTransceiver(Camera(), direction="sendonly")
        await peer.setLocalDescription(await peer.createOffer())
        frames = NewestFrames(fps=16, width=64, height=48, most=4)
        source = CameraSource(frames, on_end=lambda source: ended.set())
        await source.answer(peer.localDescription.sdp, RTCConfiguration(iceServers=[]))
        await peer.close()  # the answer is never applied
        async with asyncio.timeout(BOUND_S):
            await ended.wait()
        source.close()
        await asyncio.sleep(0)
        assert source._leaving is not None
        await source._leaving

    asyncio.run(offer())
