"""Fragments play from wherever a viewer joins, and are made once for all of them."""

import asyncio
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import pytest

from scope_runners.serve.media.encoder import Codec, Encoded, VideoEncoder
from scope_runners.serve.media.fragments import Fragmenter
from scope_runners.serve.media.rendition import Rendition
from scope_runners.serve.media.viewer import Viewer
from tests.serve.media.shown_hub import FPS, GREEN, RED, is_colour, played, shown_hub

BOUND_S = 60.0


class HandedRendition(Rendition):
    """Whose packets a test hands over, on its own thread."""

    def __init__(self) -> None:
        super().__init__(Codec.H264, width=64, height=64, fps=Fraction(FPS), clock=lambda: float(0))
        self._encoder_of_test = VideoEncoder(Codec.H264, width=64, height=64, fps=Fraction(FPS))
        self.number = 0

    def join(self, taker: Any) -> None:
        self._takers.append(taker)

    def give(self, *, as_key: bool = False, colour: tuple[int, int, int] = RED) -> None:
        frame = played(colour, self.number)
        encoded = self._encoder_of_test.encode(frame, as_key=as_key)
        assert encoded is not None
        self.number += 1
        for taker in list(self._takers):
            taker(encoded)


@pytest.fixture
def rendition() -> HandedRendition:
    return HandedRendition()


def test_a_late_viewer_begins_with_an_initialisation_and_a_keyframe(
    rendition: HandedRendition,
) -> None:
    fragmenter, early, late = Fragmenter(rendition), list[Encoded](), list[Encoded]()
    fragmenter.join(early.append)
    for _ in range(5):
        rendition.give()
    fragmenter.join(late.append)
    for _ in range(3):
        rendition.give()
    assert not late, "there is no keyframe yet"
    rendition.give(as_key=True, colour=GREEN)
    for _ in range(4):
        rendition.give(colour=GREEN)
    assert len(decoded(early)) == 12, "the newest frame is not known to have ended"
    pictures = decoded(late)
    assert len(pictures) == 4
    assert all(is_colour(picture, GREEN) for picture in pictures)
    assert late[0].data.endswith(early[8].data), "made once for both"
    assert b"ftyp" not in b"".join(each.data for each in (*early[1:], *late[1:]))


def test_frames_are_as_long_as_they_were_shown(rendition: HandedRendition) -> None:
    fragmenter, got = Fragmenter(rendition), list[Encoded]()
    fragmenter.join(got.append)
    for skipped in (1, 1, 3, 1, 1):
        rendition.number += skipped - 1
        rendition.give()
    with av.open(BytesIO(b"".join(each.data for each in got)), "r") as container:
        times_s = [each.time for each in container.decode(video=0)]
    assert times_s == pytest.approx([each / FPS for each in (0, 1, 4, 5)])


def test_the_encoder_is_left_with_the_last_viewer_and_a_new_one_begins_anew(
    rendition: HandedRendition,
) -> None:
    fragmenter = Fragmenter(rendition)
    for _ in range(2):
        got = list[Encoded]()
        fragmenter.join(got.append)
        rendition.give(as_key=True)
        for _ in range(3):
            rendition.give()
        assert len(decoded(got)) == 3
        fragmenter.leave(got.append)
        fragmenter.leave(got.append)
        rendition.give()
        assert len(got) == 3


def test_who_leaves_while_a_packet_is_handed_out_has_left(rendition: HandedRendition) -> None:
    fragmenter, late = Fragmenter(rendition), list[Encoded]()

    def first(encoded: Encoded) -> None:
        if encoded.is_key:
            fragmenter.leave(late.append)

    fragmenter.join(first)
    for _ in range(3):
        rendition.give()
    fragmenter.join(late.append)
    rendition.give(as_key=True)
    rendition.give()
    rendition.give()
    assert len(late) <= 1
    fragmenter.leave(first)
    assert not rendition._takers


def test_a_viewer_of_a_hub_gets_fragments_of_what_is_shown(tmp_path: Path) -> None:
    async def watch() -> list[Encoded]:
        viewer = shown.hub.join_fragments(asyncio.get_running_loop())
        return [await taken(viewer) for _ in range(6)]

    with shown_hub(tmp_path) as shown:
        pictures = decoded(asyncio.run(watch()))
    assert len(pictures) == 6
    assert is_colour(pictures[-1], RED)


def decoded(fragments: list[Encoded]) -> list[Any]:
    with av.open(BytesIO(b"".join(each.data for each in fragments)), "r") as container:
        return [each.to_ndarray(format="rgb24") for each in container.decode(video=0)]


async def taken(viewer: Viewer) -> Encoded:
    encoded = await asyncio.wait_for(viewer.next(), BOUND_S)
    assert encoded is not None
    return encoded
