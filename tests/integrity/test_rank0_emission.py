"""What rank0 hands out, to a consumer or to a video, is the chunk that was checked."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from scope_contracts.errors import IntegrityError
from scope_rt.config import StreamConfig
from scope_rt.control.chunk import Arrived, Chunk
from scope_rt.faults import FaultPoint
from scope_rt.session import StreamSession
from scope_rt.video.writer import VideoWriter
from scope_runners.stream import main as stream_main
from tests.integrity.corruption import PROMPT, Change
from tests.integrity.rank0_streams import AT, UNTOUCHED, nudge, shown_with
from tests.tiny_folder import tiny_folder


@torch.inference_mode()
def nudge_in_place(chunk: Arrived | Chunk) -> None:
    chunk.latents.add_(1e-3)


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
    "the chunk's own latents in place": (
        FaultPoint.EMIT,
        nudge_in_place,
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
        StreamSession(StreamConfig.of(tiny_folder(), integrity="strict")) as session,
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


def test_a_video_has_no_frames_that_changed_while_they_waited(tmp_path: Path) -> None:
    shown = shown_with(UNTOUCHED, integrity="strict", num_chunks=3)
    writer = VideoWriter(tmp_path / "a.mp4", width=32, height=16, fps=16, keep_on_error=True)
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
    arguments += ["--model", str(tiny_folder())]
    assert stream_main([*arguments, "--out", str(tmp_path / "a.mp4")]) not in (0, None)
    said = capfd.readouterr().err
    assert f"chunk {AT}: its frames changed while they waited" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("order", [(0, 2, 1), (0, 1, 1)])
def test_a_video_has_its_chunks_once_and_in_order(tmp_path: Path, order: tuple[int, ...]) -> None:
    shown = shown_with(UNTOUCHED, num_chunks=3)
    writer = VideoWriter(tmp_path / "a.mp4", width=32, height=16, fps=16, keep_on_error=True)
    with (
        pytest.raises(IntegrityError, match=f"chunk 1: comes to be encoded after chunk {order[1]}"),
        writer,
    ):
        for index in order:
            writer.write(shown[index].frames, chunk_index=index)
    assert writer.durable_chunks == 2
