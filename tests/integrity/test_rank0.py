"""Rank0 emits what was verified: in strict no changed chunk is shown, whatever changed on rank0."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from scope_contracts.errors import FingerprintError, IntegrityError, UserInputError
from scope_rt.checks import Checks
from scope_rt.config import StreamConfig
from scope_rt.control.chunk import Arrived, Chunk
from scope_rt.faults import FaultPoint
from scope_rt.instruments import Instruments
from scope_rt.session import ScheduledEvent, StreamSession
from scope_rt.text.words import WordTextEncoder
from scope_rt.vae.checked import CheckedDecoder
from scope_rt.vae.tiny import TinyVideoCodec
from scope_rt.video.writer import VideoWriter
from scope_runners.stream import main as stream_main
from tests.integrity.corruption import PROMPT, Change, flip_bit
from tests.tiny_folder import KREA_RECIPE, write_tiny_folder

AT, WITHIN = 3, 4
"""The chunk at which something is changed, and M in the tests of the default."""
RECOMPUTED = ScheduledEvent(chunk_index=AT, recompute=True)


def nothing(*values: object, **named: object) -> None:
    """No check at all."""


def shown_with(
    change: Any,
    *,
    num_chunks: int = AT + 3,
    checks: Checks | None = None,
    events: Sequence[ScheduledEvent] = (),
    shown: list[Chunk] | None = None,
    each: Callable[[StreamSession, Chunk], object] = lambda session, chunk: None,
    **settings: Any,
) -> list[Chunk]:
    """What a stream showed; `shown` has it also where the stream raises."""
    shown = [] if shown is None else shown
    config = StreamConfig.of(**({"verify_within": WITHIN} | settings))
    instruments = Instruments(faults=change, checks=checks or Checks())
    with StreamSession(config, instruments=instruments) as session:
        for chunk in session.stream(PROMPT, num_chunks=num_chunks, schedule=events):
            shown.append(replace(chunk, frames=chunk.frames.copy(), latents=chunk.latents.clone()))
            each(session, chunk)
    return shown


def pixels(chunks: Sequence[Chunk]) -> list[bytes]:
    return [chunk.frames.tobytes() for chunk in chunks]


def flip_codec_weight(decoder: CheckedDecoder) -> None:
    assert isinstance(decoder.codec, TinyVideoCodec)
    flip_bit(decoder.codec.decoder.get_parameter("full.bias"))


def scale_codec_weight(decoder: CheckedDecoder) -> None:
    assert isinstance(decoder.codec, TinyVideoCodec)
    decoder.codec.decoder.full.weight.data.mul_(1.1)


def feed(decoder: CheckedDecoder) -> None:
    """Latents of another stream."""
    decoder.decode(torch.randn(1, 3, 16, 8, 8))


def reset(decoder: CheckedDecoder) -> None:
    decoder.reset()


def nudge(arrived: Arrived) -> Arrived:
    return replace(arrived, latents=arrived.latents + 1e-3)


@torch.inference_mode()
def nudge_in_place(arrived: Arrived) -> None:
    arrived.latents.add_(1e-3)


FRAMES: dict[str, Callable[[Tensor], Tensor]] = {
    "one pixel to the right": lambda frames: frames.roll(1, 3),
    "colours swapped": lambda frames: frames.flip(-1).contiguous(),
    "frames in another order": lambda frames: frames.flip(1).contiguous(),
    "another scale": lambda frames: (frames.float() * 0.9).byte(),
    "wrapped around": lambda frames: frames + 16,
    "blank": torch.zeros_like,
    "one number": lambda frames: (
        frames.flatten()
        .index_add(0, torch.tensor(70_000), torch.ones(1, dtype=torch.uint8))
        .view_as(frames)
    ),
    "a frame too few": lambda frames: frames[:, 1:].contiguous(),
}
ANOTHER = rf"chunk {AT}: rank 0: (its latents were decoded to another picture|decoded frames)"
STRICT: dict[str, tuple[FaultPoint, Callable[[Any], Any], str]] = {
    "weight of the codec": (FaultPoint.DECODER, flip_codec_weight, "weight vae.decoder.full.bias"),
    "memory of another stream": (FaultPoint.DECODER, feed, ANOTHER),
    "no memory": (FaultPoint.DECODER, reset, ANOTHER),
    **{name: (FaultPoint.DECODED, change, ANOTHER) for name, change in FRAMES.items()},
}


@pytest.mark.parametrize("name", STRICT)
def test_strict_shows_nothing_of_a_decoder_that_gives_other_pictures(name: str) -> None:
    point, change, said = STRICT[name]
    clean = shown_with(Change(FaultPoint.START, 0, nothing), integrity="strict")
    shown: list[Chunk] = []
    broken = Change(point, AT, change)
    with pytest.raises(IntegrityError, match=said) as raised:
        shown_with(broken, shown=shown, integrity="strict")
    assert broken.was_made
    assert pixels(shown) == pixels(clean[:AT])
    assert raised.value.retraction is None


HANDED_OUT: dict[str, tuple[FaultPoint, Callable[[Any], Any], str]] = {
    "latents after they were checked": (
        FaultPoint.ARRIVED,
        nudge,
        f"chunk {AT}: rank 0: latents at the decoder changed",
    ),
    "the same latents in place": (
        FaultPoint.ARRIVED,
        nudge_in_place,
        f"chunk {AT}: rank 0: latents at the decoder changed",
    ),
    "latents that are handed out": (
        FaultPoint.EMIT,
        lambda chunk: replace(chunk, latents=chunk.latents + 1e-3),
        f"chunk {AT}: rank 0: hands out latents_sha256",
    ),
    "frames that are handed out": (
        FaultPoint.EMIT,
        lambda chunk: replace(chunk, frames=chunk.frames[::-1]),
        f"chunk {AT}: rank 0: hands out frames_crc32",
    ),
    "another index": (
        FaultPoint.EMIT,
        lambda chunk: replace(chunk, chunk_index=AT + 1),
        f"chunk {AT}: rank 0: hands out chunk_index {AT + 1}, decoded was {AT}",
    ),
    "another epoch": (
        FaultPoint.EMIT,
        lambda chunk: replace(chunk, cache_epoch=1),
        f"chunk {AT}: rank 0: hands out cache_epoch 1, decoded was 0",
    ),
}


@pytest.mark.parametrize("level", ["default", "strict"])
@pytest.mark.parametrize("name", HANDED_OUT)
def test_what_changes_on_rank0_is_not_handed_out_at_any_level(name: str, level: str) -> None:
    point, change, said = HANDED_OUT[name]
    shown: list[Chunk] = []
    with pytest.raises(IntegrityError, match=said):
        shown_with(Change(point, AT, change), shown=shown, integrity=level)
    assert len(shown) == AT


def test_frames_that_change_once_they_were_compared_are_seen_in_strict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = Arrived.shown

    def other(self: Arrived, frames_BTHWC: Tensor, **of: Any) -> Chunk:
        is_due = self.envelope.chunk_index == AT
        return real(self, frames_BTHWC.flip(3).contiguous() if is_due else frames_BTHWC, **of)

    monkeypatch.setattr(Arrived, "shown", other)
    shown: list[Chunk] = []
    with (
        pytest.raises(IntegrityError, match=f"chunk {AT}: rank 0: hands out frames_crc32"),
        StreamSession(StreamConfig.of(integrity="strict")) as session,
    ):
        for chunk in session.stream(PROMPT, num_chunks=AT + 2):
            shown.append(chunk)
    assert len(shown) == AT


def test_frames_that_change_in_place_after_the_decode_are_seen_in_strict() -> None:
    def write(chunk: Chunk) -> None:
        chunk.frames[5, 7, 9] ^= 1

    shown: list[Chunk] = []
    with pytest.raises(IntegrityError, match=f"chunk {AT}: rank 0: hands out frames_crc32"):
        shown_with(Change(FaultPoint.EMIT, AT, write), shown=shown, integrity="strict")
    assert len(shown) == AT
    shown_with(Change(FaultPoint.EMIT, AT, write))


DISARMED: dict[str, tuple[FaultPoint, Callable[[Any], Any], dict[str, Any]]] = {
    "decoder": (FaultPoint.DECODED, FRAMES["one pixel to the right"], {"decoded": nothing}),
    "weights": (FaultPoint.DECODER, scale_codec_weight, {"weights": nothing, "codec": nothing}),
    "latents": (FaultPoint.ARRIVED, nudge, {"kept": nothing, "emitted": nothing}),
    "emission": (
        FaultPoint.EMIT,
        lambda chunk: replace(chunk, frames=chunk.frames[::-1].copy()),
        {"emitted": nothing},
    ),
}


@pytest.mark.parametrize("name", DISARMED)
def test_without_its_check_a_change_is_shown_in_strict(name: str) -> None:
    point, change, off = DISARMED[name]
    clean = shown_with(Change(FaultPoint.START, 0, nothing), integrity="strict")
    checks = replace(Checks(), **off)
    wrong = shown_with(Change(point, AT, change), checks=checks, integrity="strict")
    assert pixels(wrong) != pixels(clean)


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


@pytest.mark.parametrize("level", ["default", "strict"])
def test_a_fade_to_one_value_is_shown_where_every_decoder_shows_it(
    monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    def faded(codec: TinyVideoCodec, latents_BFCHW: Tensor, previous: object) -> Tensor:
        _, num, _, height, width = latents_BFCHW.shape
        return torch.full((1, 4 * num, 3, 8 * height, 8 * width), -1.0)

    monkeypatch.setattr(TinyVideoCodec, "decode", faded)
    shown = shown_with(Change(FaultPoint.START, 0, nothing), integrity=level)
    assert len(shown) == AT + 3
    assert not any(chunk.frames.any() for chunk in shown)


@pytest.mark.parametrize("level", ["default", "strict"])
def test_a_picture_of_one_value_that_another_decoder_does_not_show_is_refused(level: str) -> None:
    shown: list[Chunk] = []
    with pytest.raises(IntegrityError, match=ANOTHER):
        shown_with(Change(FaultPoint.DECODED, AT, torch.zeros_like), shown=shown, integrity=level)
    assert len(shown) == AT


def test_a_prompt_that_is_encoded_wrong_once_is_refused() -> None:
    slip = Change(FaultPoint.ENCODED, -1, lambda embeds: embeds * 1.01)
    with pytest.raises(IntegrityError, match=r"prompt .*: rank 0: its embeddings, encoded"):
        shown_with(slip)
    assert shown_with(slip, checks=replace(Checks(), text=nothing))


def test_a_prompt_that_is_encoded_wrong_leaves_the_stream_as_it_was() -> None:
    def steer(session: StreamSession, chunk: Chunk) -> None:
        if chunk.chunk_index == 1:
            encoder = session.setup.text_encoder
            assert isinstance(encoder, WordTextEncoder)
            before = encoder.forward
            answers = iter([encoder(["a red circle"]), encoder(["a white circle"])])
            encoder.forward = lambda prompts: next(answers)  # type: ignore[method-assign]
            with pytest.raises(IntegrityError, match="encoded again"):
                session.prompt("a red circle")
            encoder.forward = before  # type: ignore[method-assign]

    clean = shown_with(Change(FaultPoint.START, 0, nothing))
    assert pixels(shown_with(Change(FaultPoint.START, 0, nothing), each=steer)) == pixels(clean)


def test_a_weight_of_the_text_encoder_is_found_in_strict_with_the_next_chunk() -> None:
    def flip(session: StreamSession, chunk: Chunk) -> None:
        encoder = session.setup.text_encoder
        assert isinstance(encoder, WordTextEncoder)
        if chunk.chunk_index == AT - 1:
            flip_bit(encoder.words.weight)

    shown: list[Chunk] = []
    with pytest.raises(FingerprintError, match=f"chunk {AT}: rank 0: weight text_encoder.words"):
        shown_with(Change(FaultPoint.START, 0, nothing), shown=shown, each=flip, integrity="strict")
    assert len(shown) == AT


def test_embeddings_that_change_while_they_are_kept_are_not_sent() -> None:
    def change(session: StreamSession, chunk: Chunk) -> None:
        if chunk.chunk_index == 0:
            with torch.inference_mode():
                session.setup.conditioning("a white circle").embeds.add_(1)
            session.prompt("a white circle")

    shown: list[Chunk] = []
    with pytest.raises(IntegrityError, match="rank 0: the prompt's embeddings changed"):
        shown_with(Change(FaultPoint.START, 0, nothing), shown=shown, each=change)
    assert [chunk.prompt for chunk in shown] == [PROMPT]


@pytest.mark.parametrize("part", ["_recent", "_sinks"])
def test_context_that_changes_while_it_is_kept_is_not_recomputed_from(
    tmp_path: Path, part: str
) -> None:
    folder = write_tiny_folder(tmp_path)

    def change(session: StreamSession, chunk: Chunk) -> None:
        if chunk.chunk_index == AT - 1:
            assert session._context is not None
            with torch.inference_mode():
                getattr(session._context, part).view(-1)[7] += 1e-3

    untouched = Change(FaultPoint.START, 0, nothing)
    clean = shown_with(untouched, events=[RECOMPUTED], model=folder)
    shown: list[Chunk] = []
    said = f"chunk {AT}: rank 0: the context of a recompute changed"
    with pytest.raises(IntegrityError, match=said):
        shown_with(untouched, shown=shown, each=change, events=[RECOMPUTED], model=folder)
    assert pixels(shown) == pixels(clean[:AT])


@pytest.mark.parametrize("mode", ["r0", "r0a"])
def test_a_recompute_model_recomputes_from_what_arrived(tmp_path: Path, mode: str) -> None:
    folder = write_tiny_folder(tmp_path, KREA_RECIPE)

    def change(session: StreamSession, chunk: Chunk) -> None:
        if chunk.chunk_index == AT - 1:
            assert session._context is not None
            kept = session._context._frames if mode == "r0a" else session._context._recent
            with torch.inference_mode():
                kept.view(-1)[7] += 1

    untouched = Change(FaultPoint.START, 0, nothing)
    settings: dict[str, Any] = {"model": folder, "recompute": mode, "integrity": "strict"}
    assert len(shown_with(untouched, num_chunks=AT + 5, **settings)) == AT + 5
    shown: list[Chunk] = []
    said = "frames of the anchor" if mode == "r0a" else "the context of a recompute"
    with pytest.raises(IntegrityError, match=f"chunk {AT}: rank 0: {said} changed"):
        shown_with(untouched, shown=shown, each=change, **settings)
    assert len(shown) == AT


class Spoiled:
    """Latents of a chunk change in place, after the decoder had them."""

    def __init__(self) -> None:
        self._latents = torch.empty(0)

    def reach(self, point: FaultPoint, chunk: int, value: Any) -> Any:
        if point is FaultPoint.ARRIVED:
            self._latents = value.latents
        if (point, chunk) == (FaultPoint.DECODED, AT):
            with torch.inference_mode():
                self._latents.add_(1e-3)
        return value


@pytest.mark.parametrize("records", [True, False], ids=["recording", "snapshot"])
def test_latents_that_are_kept_are_those_that_were_shown(tmp_path: Path, records: bool) -> None:
    files: dict[str, Any] = {"log": tmp_path / "log", "snapshot": tmp_path / "snapshot"}
    files["record_latents"] = records
    what = "the recording" if records else "the resume point"
    shown: list[Chunk] = []
    with pytest.raises(IntegrityError, match=f"chunk {AT}: rank 0: latents for {what} changed"):
        shown_with(Spoiled(), shown=shown, **files)
    assert len(shown) == AT
    with StreamSession(StreamConfig.of(resume=True, verify_within=WITHIN, **files)) as session:
        first = session.resumed_at_chunk
        again = list(session.stream("none", num_chunks=AT + 3, acknowledged=lambda: first or 0))
    assert [chunk.chunk_index for chunk in again] == list(range(first or 0, AT + 3))


def test_a_snapshot_of_latents_that_had_changed_is_not_resumed(tmp_path: Path) -> None:
    files: dict[str, Any] = {"log": tmp_path / "log", "snapshot": tmp_path / "snapshot"}
    off = replace(Checks(), kept=nothing, emitted=nothing)
    shown_with(Spoiled(), checks=off, num_chunks=AT + 1, **files)
    with pytest.raises(UserInputError, match="latents that were damaged before they were saved"):
        StreamSession(StreamConfig.of(resume=True, **files))


def test_a_video_has_no_frames_that_changed_while_they_waited(tmp_path: Path) -> None:
    shown = shown_with(Change(FaultPoint.START, 0, nothing), integrity="strict", num_chunks=3)
    writer = VideoWriter(tmp_path / "a.mp4", width=64, height=64, fps=16, keep_on_error=True)
    with (
        pytest.raises(IntegrityError, match="chunk 1: its frames changed while they waited"),
        writer,
    ):
        for chunk in shown:
            if chunk.chunk_index == 1:
                chunk.frames[3, 4, 5] ^= 1  # by another consumer
            writer.write(chunk.frames, chunk_index=chunk.chunk_index, crc32=chunk.frames_crc32)
        writer.drain()
    assert writer.durable_chunks == 1


def test_a_stream_whose_writer_finds_changed_frames_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = VideoWriter._encode

    def changed(self: VideoWriter, frames_THWC: Any, chunk_index: int, crc32: int) -> None:
        frames_THWC[0, 0, 0] ^= chunk_index == AT  # by another thread
        encode(self, frames_THWC, chunk_index, crc32)

    monkeypatch.setattr(VideoWriter, "_encode", changed)
    arguments = ["--prompt", PROMPT, "--seconds", "6", "--integrity", "strict"]
    assert stream_main([*arguments, "--out", str(tmp_path / "a.mp4")]) not in (0, None)
    said = capfd.readouterr().err
    assert f"chunk {AT}: its frames changed while they waited" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("order", [(0, 2, 1), (0, 1, 1)])
def test_a_video_has_its_chunks_once_and_in_order(tmp_path: Path, order: tuple[int, ...]) -> None:
    shown = shown_with(Change(FaultPoint.START, 0, nothing), num_chunks=3)
    writer = VideoWriter(tmp_path / "a.mp4", width=64, height=64, fps=16, keep_on_error=True)
    with (
        pytest.raises(IntegrityError, match=f"chunk 1: comes to be encoded after chunk {order[1]}"),
        writer,
    ):
        for index in order:
            writer.write(shown[index].frames, chunk_index=index)
    assert writer.durable_chunks == 2


def test_cuts_prompts_and_recomputes_are_no_false_alarm_in_strict() -> None:
    def steer(session: StreamSession, chunk: Chunk) -> None:
        if chunk.chunk_index == 4:
            session.hard_cut()
        if chunk.chunk_index == 7:
            session.prompt("a white triangle")

    events = [ScheduledEvent(chunk_index=2, hard_cut=True), RECOMPUTED]
    untouched = Change(FaultPoint.START, 0, nothing)
    shown = shown_with(
        untouched, num_chunks=12, events=events, each=steer, integrity="strict", verify_within=1
    )
    assert len(shown) == 12
    assert [chunk.cache_epoch for chunk in shown][-1] == 2


def test_an_error_of_rank0_is_said_once_and_with_the_chunk_that_it_is_of() -> None:
    change = Change(FaultPoint.DECODER, AT, flip_codec_weight)
    session = StreamSession(
        StreamConfig.of(integrity="strict"), instruments=Instruments(faults=change)
    )
    with pytest.raises(FingerprintError, match=f"chunk {AT}: rank 0: weight vae"):
        for _ in session.stream(PROMPT, num_chunks=AT + 2):
            pass
    session.close()
