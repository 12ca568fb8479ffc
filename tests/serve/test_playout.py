"""Frames are shown one after the other at their times, by an injected clock."""

import threading
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from scope_contracts.errors import ScopeError
from scope_runners.serve.media.frame import PlayedFrame
from scope_runners.serve.playout import Arrived, Playout, Timeline

FPS = Fraction(16)
FRAME_S = 1 / 16


def chunk(index: int, *, epoch: int = 0, num_frames: int = 4) -> Arrived:
    frames = np.full((num_frames, 2, 2, 3), index, np.uint8)
    return Arrived(frames=frames, chunk_index=index, cache_epoch=epoch)


def shown(timeline: Timeline, now_s: float) -> list[tuple[int, int]]:
    """Chunk and time of all that is due."""
    found = []
    while (frame := timeline.next(now_s)) is not None:
        found.append((frame.chunk_index, frame.time_90k))
    return found


def test_frames_follow_each_other_at_their_distance() -> None:
    timeline = Timeline(FPS)
    timeline.add(chunk(0), 100.0, chunk_s=0.0)
    assert shown(timeline, 100.0) == [(0, 0)]
    assert timeline.wait_s(100.01) == pytest.approx(FRAME_S - 0.01)
    assert shown(timeline, 100.0 + 2 * FRAME_S) == [(0, 5625), (0, 11250)]
    assert timeline.media_left_s == pytest.approx(FRAME_S)


def test_a_chunk_that_comes_in_time_is_shown_without_a_gap_and_one_that_does_not_is_a_stall() -> (
    None
):
    timeline = Timeline(FPS)
    timeline.add(chunk(0), 0.0, chunk_s=0.0)
    timeline.add(chunk(1), 0.1, chunk_s=0.0)
    times = [time for _, time in shown(timeline, 0.45)]
    assert times == [number * 5625 for number in range(8)]
    assert timeline.num_stalls == 0
    timeline.add(chunk(2), 3.0, chunk_s=0.0)
    assert timeline.num_stalls == 1
    assert shown(timeline, 3.0) == [(2, 270_000)]


def test_a_hard_cut_takes_the_place_of_all_that_waits() -> None:
    timeline = Timeline(FPS)
    timeline.add(chunk(0), 0.0, chunk_s=0.0)
    assert shown(timeline, 0.0) == [(0, 0)]
    timeline.add(chunk(1, epoch=1), 0.01, chunk_s=0.0)
    assert timeline.num_dropped == 3
    assert [index for index, _ in shown(timeline, 0.5)] == [1, 1, 1, 1]


def test_chunks_that_cost_more_than_they_show_are_spread_over_their_time() -> None:
    timeline = Timeline(FPS)
    timeline.add(chunk(0), 0.0, chunk_s=1.0)
    assert timeline.interval_s == pytest.approx(1.05 / 4)
    timeline.add(chunk(1), 0.5, chunk_s=0.2)
    assert timeline.interval_s == pytest.approx(FRAME_S)


def test_time_stands_still_in_a_pause() -> None:
    timeline = Timeline(FPS)
    timeline.add(chunk(0), 0.0, chunk_s=0.0)
    assert len(shown(timeline, 0.07)) == 2
    timeline.pause()
    assert timeline.wait_s(50.0) == 0.0
    assert len(shown(timeline, 50.0)) == 1, "no frame is skipped, none comes at once"
    assert timeline.num_stalls == 0


def test_what_is_made_again_is_not_shown_before() -> None:
    timeline = Timeline(FPS)
    timeline.add(chunk(5, epoch=3), 0.0, chunk_s=0.0)
    timeline.forget()
    timeline.add(chunk(2, epoch=1), 0.1, chunk_s=0.0)
    assert [index for index, _ in shown(timeline, 1.0)] == [2, 2, 2, 2]


def test_the_thread_shows_what_is_added_and_stops_where_it_is_told_to() -> None:
    frames: list[PlayedFrame] = []
    has_come = threading.Event()

    def show(frame: PlayedFrame) -> None:
        frames.append(frame)
        if len(frames) == 4:
            has_come.set()

    now, errors = [0.0], list[ScopeError]()
    clock: Callable[[], float] = lambda: now[0]  # noqa: E731
    playout = Playout(Timeline(FPS), show, lambda: 0.01, clock, on_error=errors.append)
    playout.start()
    playout.pause(is_paused=True)
    playout.add(chunk(0), chunk_s=0.0)
    now[0] = 1.0
    assert not has_come.wait(0.1)
    assert frames == []
    playout.pause(is_paused=False)
    while not has_come.wait(0.01):
        now[0] += FRAME_S
    playout.close()
    assert [frame.number for frame in frames] == [0, 1, 2, 3]
    assert [frame.is_first for frame in frames] == [True, False, False, False]
    assert not errors


@pytest.mark.parametrize("error", [ScopeError("the disk is full"), ValueError("the disk is full")])
def test_what_cannot_be_shown_is_told_and_does_not_stand_still_in_silence(error: Exception) -> None:
    errors: list[ScopeError] = []
    has_failed = threading.Event()

    def show(frame: PlayedFrame) -> None:
        raise error

    def told(error: ScopeError) -> None:
        errors.append(error)
        has_failed.set()

    playout = Playout(Timeline(FPS), show, lambda: 0.01, lambda: 1.0, on_error=told)
    playout.start()
    playout.add(chunk(0), chunk_s=0.0)
    assert has_failed.wait(10)
    playout.close()
    (said,) = errors
    assert "the disk is full" in str(said)
