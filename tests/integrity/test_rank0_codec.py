"""The codec of rank0 is what was loaded, and what it decodes is looked at in rotation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from scope_contracts.errors import FingerprintError, IntegrityError
from scope_rt.config import StreamConfig
from scope_rt.control.chunk import Chunk
from scope_rt.faults import FaultPoint
from scope_rt.instruments import Instruments
from scope_rt.session import StreamSession
from scope_rt.vae.checked import CheckedDecoder
from scope_rt.vae.tiny import TinyVideoCodec
from tests.integrity.corruption import PROMPT, Change
from tests.integrity.rank0_streams import AT, UNTOUCHED, WITHIN, flip_codec_weight, shown_with
from tests.tiny_folder import tiny_folder


def test_by_default_a_weight_of_the_codec_is_found_within_m_chunks() -> None:
    shown: list[Chunk] = []
    with pytest.raises(
        FingerprintError, match=r"rank 0: weight vae\.decoder\.full\.bias"
    ) as raised:
        shown_with(
            Change(FaultPoint.DECODER, AT, flip_codec_weight),
            shown=shown,
            num_chunks=AT + WITHIN + 1,
        )
    assert len(shown) < AT + WITHIN
    retraction = raised.value.retraction
    assert retraction is None or retraction.first_chunk <= AT


def test_a_weight_that_changes_with_the_last_chunk_is_found_as_the_stream_ends() -> None:
    with pytest.raises(FingerprintError, match=r"rank 0: weight vae\.decoder\.full\.bias"):
        shown_with(
            Change(FaultPoint.DECODER, AT, flip_codec_weight), num_chunks=AT + 1, verify_within=32
        )


def test_by_default_one_chunk_in_8_m_is_decoded_again_and_speaks_against_those_between() -> None:
    def shift(frames: Tensor) -> Tensor:
        return frames.roll(1, 3)

    every, turn = 8, 4  # with M = 1
    shown_with(Change(FaultPoint.DECODED, turn + 1, shift), num_chunks=8, verify_within=1)
    shown: list[Chunk] = []
    with pytest.raises(IntegrityError, match=f"chunk {turn}: .* another picture") as raised:
        shown_with(
            Change(FaultPoint.DECODED, turn, shift), num_chunks=8, verify_within=1, shown=shown
        )
    assert len(shown) == turn < every
    assert raised.value.suspect_from == turn + 1 - every
    retraction = raised.value.retraction
    assert retraction is not None
    assert (retraction.first_chunk, retraction.last_chunk) == (0, turn - 1)


def test_a_codec_that_is_wrong_the_same_way_twice_shows_fixed_latents_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decode = TinyVideoCodec.decode

    def brighter(codec: TinyVideoCodec, *latents: Any) -> Tensor:
        return (decode(codec, *latents) + 0.1).clamp(-1, 1)

    def change(decoder: CheckedDecoder) -> None:
        monkeypatch.setattr(TinyVideoCodec, "decode", brighter)

    shown: list[Chunk] = []
    with pytest.raises(
        IntegrityError, match=f"chunk {AT}: .* the picture of fixed latents changed"
    ):
        shown_with(Change(FaultPoint.DECODER, AT, change), shown=shown, integrity="strict")
    assert len(shown) == AT


def dimmed(video: Tensor) -> Tensor:
    return video.clamp(max=0.5)


def last_row_off(video: Tensor) -> Tensor:
    video[..., -1, :] -= 0.02
    return video


@pytest.mark.parametrize("wrong", [dimmed, last_row_off])
def test_in_strict_a_codec_that_goes_wrong_for_some_pixels_alone_shows_nothing_wrong(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Tensor], Tensor]
) -> None:
    decode = TinyVideoCodec.decode

    def change(decoder: CheckedDecoder) -> None:
        monkeypatch.setattr(TinyVideoCodec, "decode", lambda *given: wrong(decode(*given)))

    shown: list[Chunk] = []
    with pytest.raises(IntegrityError, match="the picture of fixed latents changed"):
        shown_with(Change(FaultPoint.DECODER, AT, change), shown=shown, integrity="strict")
    assert len(shown) == AT


@pytest.mark.parametrize("starts_epoch", [True, False])
def test_in_strict_a_codec_that_goes_wrong_for_one_of_the_fixed_frames_shows_nothing_wrong(
    monkeypatch: pytest.MonkeyPatch, starts_epoch: bool
) -> None:
    decode = TinyVideoCodec.decode

    def brighter(codec: TinyVideoCodec, latents: Tensor, previous: Tensor | None) -> Tensor:
        video = decode(codec, latents, previous)
        return (video + 0.1).clamp(-1, 1) if (previous is None) == starts_epoch else video

    def change(decoder: CheckedDecoder) -> None:
        monkeypatch.setattr(TinyVideoCodec, "decode", brighter)

    shown: list[Chunk] = []
    with pytest.raises(IntegrityError, match="the picture of fixed latents changed") as raised:
        shown_with(Change(FaultPoint.DECODER, AT, change), shown=shown, integrity="strict")
    assert len(shown) == raised.value.suspect_from == AT


@pytest.mark.parametrize("level", ["default", "strict"])
def test_a_fade_to_one_value_is_shown_where_every_decoder_shows_it(
    monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    def faded(codec: TinyVideoCodec, latents_BFCHW: Tensor, previous: object) -> Tensor:
        _, num, _, height, width = latents_BFCHW.shape
        return torch.full((1, 4 * num, 3, 8 * height, 8 * width), -1.0)

    monkeypatch.setattr(TinyVideoCodec, "decode", faded)
    shown = shown_with(UNTOUCHED, integrity=level)
    assert len(shown) == AT + 3
    assert not any(chunk.frames.any() for chunk in shown)


def test_an_error_of_rank0_is_said_once_and_with_the_chunk_that_it_is_of() -> None:
    change = Change(FaultPoint.DECODER, AT, flip_codec_weight)
    session = StreamSession(
        StreamConfig.of(tiny_folder(), integrity="strict"), instruments=Instruments(faults=change)
    )
    with pytest.raises(FingerprintError, match=f"chunk {AT}: rank 0: weight vae"):
        for _ in session.stream(PROMPT, num_chunks=AT + 2):
            pass
    session.close()


@pytest.mark.parametrize("level", ["default", "strict"])
def test_a_setting_that_changes_for_the_thread_that_decodes_shows_nothing(level: str) -> None:
    def change(frames: Tensor) -> None:
        torch.set_default_dtype(torch.float64)

    shown: list[Chunk] = []
    try:
        with pytest.raises(IntegrityError, match=r"default_dtype=torch\.float64") as raised:
            shown_with(Change(FaultPoint.DECODED, AT, change), shown=shown, integrity=level)
    finally:
        torch.set_default_dtype(torch.float32)
    assert raised.value.suspect_from is not None
    assert raised.value.suspect_from <= AT <= len(shown) < AT + WITHIN
