"""A frame leaves its encoder at once, in its colours, at its time; keyframes when asked."""

from dataclasses import replace
from fractions import Fraction
from io import BytesIO
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from scope_runners.serve.media.encoder import Codec, VideoEncoder, encoded_size, jpeg_of
from scope_runners.serve.media.frame import PlayedFrame
from tests.serve.media.shown_hub import FPS, GREEN, RED, is_colour, played

VIDEO = (Codec.H264, Codec.VP8)
DECODERS = {Codec.H264: "h264", Codec.VP8: "vp8"}


def encoder_of(codec: Codec) -> VideoEncoder:
    return VideoEncoder(codec, width=64, height=64, fps=Fraction(FPS))


@pytest.mark.parametrize("codec", VIDEO)
def test_each_frame_is_decoded_in_its_colours_before_the_next_is_encoded(codec: Codec) -> None:
    encoder = encoder_of(codec)
    decoder: Any = av.CodecContext.create(DECODERS[codec], "r")
    decoder.thread_count = 1
    for number, colour in enumerate((RED, RED, GREEN, RED)):
        encoded = encoder.encode(played(colour, number), as_key=False)
        assert encoded is not None
        (picture,) = decoder.decode(av.Packet(encoded.data))
        assert is_colour(picture.to_ndarray(format="rgb24"), colour)


@pytest.mark.parametrize("codec", VIDEO)
def test_only_the_first_frame_and_those_that_are_asked_for_are_keyframes(codec: Codec) -> None:
    encoder = encoder_of(codec)
    made = [encoder.encode(played(RED, number), as_key=number == 5) for number in range(10)]
    assert [number for number, each in enumerate(made) if each and each.is_key] == [0, 5]
    assert [each.time_90k for each in made if each] == [n * 90_000 // FPS for n in range(10)]


def test_a_decoder_that_begins_at_a_later_keyframe_needs_nothing_from_before() -> None:
    encoder = encoder_of(Codec.H264)
    for number in range(5):
        encoder.encode(played(RED, number), as_key=False)
    key = encoder.encode(played(GREEN, 5), as_key=True)
    assert key is not None
    decoder: Any = av.CodecContext.create("h264", "r")
    decoder.thread_count = 1
    (picture,) = decoder.decode(av.Packet(key.data))
    assert is_colour(picture.to_ndarray(format="rgb24"), GREEN)


@pytest.mark.parametrize("size", [(8, 8), (65, 33), (71, 257), (640, 360)])
@pytest.mark.parametrize("codec", VIDEO)
def test_pictures_of_any_size_are_encoded(codec: Codec, size: tuple[int, int]) -> None:
    width, height = size
    encoder = VideoEncoder(codec, width=width, height=height, fps=Fraction(FPS))
    encoded = encoder.encode(filled(width, height), as_key=True)
    assert encoded is not None
    decoder: Any = av.CodecContext.create(DECODERS[codec], "r")
    (picture,) = decoder.decode(av.Packet(encoded.data))
    assert (picture.width, picture.height) == encoded_size(width, height)
    assert is_colour(picture.to_ndarray(format="rgb24"), GREEN)


def test_a_jpeg_has_the_colours_of_its_frame() -> None:
    picture = np.asarray(Image.open(BytesIO(jpeg_of(filled(64, 40)).data)))
    assert is_colour(picture, GREEN)


def filled(width: int, height: int) -> PlayedFrame:
    return replace(played(RED, 0), frame_HWC=np.full((height, width, 3), GREEN, np.uint8))
