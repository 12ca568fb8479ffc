"""One encoder serves all who watch, while anybody does; who does not read loses alone."""

import asyncio
import threading
from fractions import Fraction
from pathlib import Path

import av
import pytest

from scope_runners.serve.media import rendition as rendition_module
from scope_runners.serve.media.encoder import Codec, Encoded, VideoEncoder
from scope_runners.serve.media.hub import TooManyViewersError
from scope_runners.serve.media.rendition import KeyframeRequests, Rendition
from scope_runners.serve.media.viewer import MOST_WAITING, Viewer
from tests.serve.media.shown_hub import FPS, RED, played, shown_hub
from tests.serve.running_server import until

BOUND_S = 60.0


def encoder_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("encode ")]


def test_keyframes_are_made_once_a_second_however_many_ask() -> None:
    requests = KeyframeRequests()
    assert not requests.take(0.0)
    requests.ask()
    assert requests.take(0.0)
    for tenth in range(1, 10):
        requests.ask()
        assert not requests.take(tenth / 10)
    assert requests.take(1.0), "what was asked for in between is not forgotten"
    assert not requests.take(2.5)


def test_an_encoder_runs_from_its_first_viewer_to_its_last(tmp_path: Path) -> None:
    async def watch() -> None:
        loop = asyncio.get_running_loop()
        viewers = [shown.hub.join(Codec.H264, loop) for _ in range(3)]
        for viewer in viewers:
            assert await asyncio.wait_for(viewer.next(), BOUND_S) is not None
        assert encoder_threads() == ["encode h264"]
        for viewer in viewers:
            viewer.leave()
            viewer.leave()
        assert shown.hub.num_viewers == 0

    with shown_hub(tmp_path) as shown:
        assert encoder_threads() == []
        for _ in range(2):
            asyncio.run(watch())
            until(lambda: not encoder_threads(), what="the encoder's end", within_s=BOUND_S)


def test_every_viewer_begins_with_a_keyframe_and_gets_the_same_packets(tmp_path: Path) -> None:
    async def watch() -> tuple[list[Encoded], list[Encoded]]:
        loop = asyncio.get_running_loop()
        first = shown.hub.join(Codec.H264, loop)
        early = [await taken(first) for _ in range(3)]
        second = shown.hub.join(Codec.H264, loop)
        late = [await taken(second) for _ in range(4)]
        while early[-1].time_90k < late[-1].time_90k:
            early.append(await taken(first))
        assert first.num_dropped == second.num_dropped == 0, "it was not slow, it had not begun"
        return early, late

    with shown_hub(tmp_path) as shown:
        early, late = asyncio.run(watch())
    assert early[0].is_key
    assert late[0].is_key
    assert {id(each) for each in late} < {id(each) for each in early}


def test_a_viewer_that_does_not_read_drops_for_itself_alone_and_goes_on_at_a_keyframe() -> None:
    asked: list[bool] = []

    async def watch() -> None:
        loop = asyncio.get_running_loop()
        slow, good = (
            Viewer(loop, ask_for_key=lambda: asked.append(True), leave=lambda viewer: None)
            for _ in range(2)
        )
        packets = [packet(number, is_key=number in (0, MOST_WAITING + 5)) for number in range(50)]
        for each in packets:
            slow.put(each)
            good.put(each)
            assert await asyncio.wait_for(good.next(), BOUND_S) is each
        assert good.num_dropped == 0
        assert asked, "it cannot go on without a keyframe"
        assert await slow.next() is packets[MOST_WAITING + 5]
        assert await slow.next() is packets[MOST_WAITING + 6]
        assert slow.num_dropped == MOST_WAITING + 5

    asyncio.run(watch())


def test_what_waits_is_read_when_the_stream_has_ended_and_then_nothing() -> None:
    async def watch() -> None:
        viewer = Viewer(
            asyncio.get_running_loop(), ask_for_key=lambda: None, leave=lambda viewer: None
        )
        waiting = asyncio.create_task(viewer.next())
        viewer.put(packet(0, is_key=True))
        viewer.put(packet(1, is_key=False))
        viewer.end()
        viewer.put(packet(2, is_key=False))
        assert (await asyncio.wait_for(waiting, BOUND_S)) is not None
        assert (await asyncio.wait_for(viewer.next(), BOUND_S)) is not None
        assert (await asyncio.wait_for(viewer.next(), BOUND_S)) is None

    asyncio.run(watch())


def test_a_viewer_whose_event_loop_is_over_ends_no_encoder(tmp_path: Path) -> None:
    async def join() -> Viewer:
        return shown.hub.join(Codec.H264, asyncio.get_running_loop())

    with shown_hub(tmp_path) as shown:
        gone, got = asyncio.run(join()), list[Encoded]()
        with asyncio.Runner() as runner:
            watching = runner.run(join())
            got = [runner.run(taken(watching)) for _ in range(3)]
            watching.leave()
        gone.leave()
    assert len(got) == 3


def test_a_viewer_beyond_the_limit_is_refused_until_one_leaves(tmp_path: Path) -> None:
    async def watch() -> None:
        loop = asyncio.get_running_loop()
        first = shown.hub.join(Codec.JPEG, loop)
        with pytest.raises(TooManyViewersError, match="--max-viewers"):
            shown.hub.join_fragments(loop)
        first.leave()
        shown.hub.join_fragments(loop).leave()

    with shown_hub(tmp_path, max_viewers=1) as shown:
        asyncio.run(watch())


def test_an_encoder_that_is_too_slow_loses_frames_and_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_encode, encode = threading.Event(), VideoEncoder.encode

    def slow(self: VideoEncoder, *arguments: object, as_key: bool) -> Encoded | None:
        assert may_encode.wait(BOUND_S)
        return encode(self, *arguments, as_key=as_key)  # type: ignore[arg-type]

    monkeypatch.setattr(VideoEncoder, "encode", slow)
    got: list[Encoded] = []
    rendition = rendition_of(Codec.H264)
    rendition.join(got.append)
    for number in range(40):
        rendition.show(played(RED, number))
    assert rendition.num_dropped >= 40 - rendition_module.MOST_WAITING - 1
    may_encode.set()
    until(lambda: got and got[-1].time_90k == 39 * 90_000 // FPS, what="the newest frame")
    assert len(got) == 40 - rendition.num_dropped
    rendition.close()


def test_a_codec_that_cannot_be_encoded_here_is_tried_again_while_anybody_watches(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    create = av.CodecContext.create

    def lacking(name: str, mode: str) -> object:
        raise ValueError(f"no {name}")

    rendition = rendition_of(Codec.VP8)
    got: list[Encoded] = []
    monkeypatch.setattr(rendition_module, "AGAIN_S", 0.05)
    monkeypatch.setattr(av.CodecContext, "create", lacking)
    rendition.join(got.append)
    until(lambda: "cannot be encoded here" in caplog.text, what="what is said of it")
    assert encoder_threads()
    monkeypatch.setattr(av.CodecContext, "create", create)
    rendition.show(played(RED, 0))
    until(lambda: len(got) == 1, what="a packet")
    monkeypatch.setattr(av.CodecContext, "create", lacking)
    rendition.leave(got.append)
    rendition.show(played(RED, 1))
    until(lambda: not encoder_threads(), what="its thread's end")
    rendition.close()


def test_viewers_of_an_encoder_that_fails_go_on_at_the_next_ones_keyframe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encode, num_failures = VideoEncoder.encode, iter(range(100))

    def failing(self: VideoEncoder, *arguments: object, as_key: bool) -> Encoded | None:
        if next(num_failures) == 2:
            raise AssertionError("by a bug")
        return encode(self, *arguments, as_key=as_key)  # type: ignore[arg-type]

    monkeypatch.setattr(rendition_module, "AGAIN_S", 0.05)
    monkeypatch.setattr(VideoEncoder, "encode", failing)
    got: list[Encoded] = []
    rendition = rendition_of(Codec.H264)
    rendition.join(got.append)
    for number in range(5):
        rendition.show(played(RED, number))
    until(lambda: len(got) == 4, what="all frames but the one that failed")
    assert [each.is_key for each in got] == [True, False, True, False]
    rendition.close()


def packet(number: int, *, is_key: bool) -> Encoded:
    return Encoded(data=b"", is_key=is_key, time_90k=number, chunk_index=0)


def rendition_of(codec: Codec) -> Rendition:
    return Rendition(codec, width=64, height=64, fps=Fraction(FPS), clock=lambda: 0.0)


async def taken(viewer: Viewer) -> Encoded:
    encoded = await asyncio.wait_for(viewer.next(), BOUND_S)
    assert encoded is not None
    return encoded
