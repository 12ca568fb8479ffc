from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from scope_contracts.errors import RecordingError
from scope_rt.control.scheduled_event import ScheduledEvent
from scope_rt.video.writer import VideoWriter
from scope_runners import storyboard
from scope_runners.chunk_record import ChunkRecord
from scope_runners.job import Timeline
from scope_runners.storyboard import Scene, scenes, write_storyboard

SIDE = 64


def chunk(index: int, *, epoch: int, prompt: str) -> ChunkRecord:
    return ChunkRecord(
        chunk_index=index,
        cache_epoch=epoch,
        prompt=prompt,
        latents_sha256="",
        frames=12,
        generator_calls=5,
        recomputed=False,
        kv_cache_attention_bias=1.0,
        stage_ms={},
    )


def test_a_long_stream_keeps_its_ends_its_changes_and_few_others() -> None:
    event = ScheduledEvent(chunk_index=501, prompt="b", hard_cut=True)
    timeline = Timeline(num_chunks=1000, num_frames=12_000, events=(event,), ignored=())
    chunks = [
        chunk(index, epoch=int(index >= 501), prompt="b" if index >= 501 else "a")
        for index in range(1000)
    ]
    told = scenes(chunks, timeline, fps=16)
    assert len(told) == 34
    assert told[0] == Scene(frame_number=6, label="0.4s e0 prompt 1")
    assert Scene(frame_number=501 * 12 + 6, label="376.1s e1 cut prompt 2") in told
    assert told[-1] == Scene(frame_number=999 * 12 + 6, label="749.6s e1")


@pytest.mark.parametrize(("num_chunks", "gaps"), [(27, {1}), (32, {1}), (60, {2})])
def test_no_chunk_of_a_short_stream_is_left_out_and_of_others_every_second(
    num_chunks: int, gaps: set[int]
) -> None:
    timeline = Timeline(num_chunks=num_chunks, num_frames=12 * num_chunks, events=(), ignored=())
    chunks = [chunk(index, epoch=0, prompt="a") for index in range(num_chunks)]
    shown = [scene.frame_number // 12 for scene in scenes(chunks, timeline, fps=16)]
    assert {after - before for before, after in pairwise(shown[:-1])} == gaps
    assert shown[-1] == num_chunks - 1


def test_the_picture_that_a_stream_begins_with_is_said_to_be_one() -> None:
    timeline = Timeline(num_chunks=2, num_frames=24, events=(), ignored=(), has_start_frame=True)
    told = scenes([chunk(index, epoch=0, prompt="a") for index in (0, 1)], timeline, fps=16)
    assert [scene.label for scene in told] == ["0.4s e0 image prompt 1", "1.1s e0"]


def video_of_greys(path: Path, num_frames: int) -> Path:
    """Frame n is grey n % 50 * 5."""
    greys = [np.full((SIDE, SIDE, 3), n % 50 * 5, np.uint8) for n in range(num_frames)]
    with VideoWriter(path, width=SIDE, height=SIDE, fps=16) as writer:
        for start in range(0, num_frames, 60):
            writer.write(np.stack(greys[start : start + 60]))
    return path


@pytest.mark.parametrize("suffix", [".mp4", ".webm"])
def test_the_pictures_are_frames_of_the_video_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    drawn: list[NDArray[np.uint8]] = []

    def draw(frames: list[NDArray[np.uint8]], labels: list[str], path: Path) -> None:
        assert labels == ["a"] * len(frames)
        drawn.extend(frames)

    monkeypatch.setattr(storyboard, "write_contact_sheet", draw)
    video = video_of_greys(tmp_path / f"a{suffix}", 660)
    numbers = [0, 1, 30, 299, 620, 659]  # near, and far enough apart to seek
    told = [Scene(frame_number=number, label="a") for number in numbers]
    write_storyboard(tmp_path / "a.png", video, told, scale=4)
    assert [picture.shape for picture in drawn] == [(SIDE, SIDE, 3)] * len(numbers)
    greys = [float(picture.mean()) for picture in drawn]
    assert greys == pytest.approx([number % 50 * 5 for number in numbers], abs=2.4)


def test_a_video_that_is_too_short_is_named(tmp_path: Path) -> None:
    video = video_of_greys(tmp_path / "a.mp4", 12)
    told = [Scene(frame_number=12, label="a")]
    with pytest.raises(RecordingError, match="it ends after frame 11, before frame 12"):
        write_storyboard(tmp_path / "a.png", video, told, scale=4)
