"""A resume point that is not of its log is not resumed."""

import os
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from scope_contracts.errors import UserInputError
from scope_contracts.log_file import LogReader
from scope_contracts.log_records import Finished
from scope_rt.control.inbox import Conditioning
from scope_rt.control.resume_point import ResumePoint
from scope_rt.control.saved_points import SavedResumePoints
from scope_rt.control.scheduled_event import ScheduledEvent
from scope_rt.control.transition import Interpolation, TransitionSpec
from scope_rt.record.log import Log
from scope_rt.record.reader import read_history
from scope_rt.record.snapshot import SnapshotStore
from scope_rt.session import StreamSession
from tests.integrity.corruption import PROMPT
from tests.integrity.resumed_streams import (
    AT,
    LOST,
    NEW_PROMPT,
    NUM_CHUNKS,
    as_shown,
    broken,
    clean,
    continued,
    settings_in,
)

SOFTLY = TransitionSpec(num_chunks=4, method=Interpolation.LERP, bias_floor=0.5)
EVENTS = [
    ScheduledEvent(chunk_index=2, prompt="a green square"),
    ScheduledEvent(chunk_index=AT - 2, prompt="a white triangle", transition=SOFTLY),
]


def other_text(point: ResumePoint) -> ResumePoint:
    assert point.conditioning is not None
    return replace(point, conditioning=Conditioning("a green square", point.conditioning.embeds))


def other_way(**changed: Any) -> Callable[[ResumePoint], ResumePoint]:
    def change(point: ResumePoint) -> ResumePoint:
        assert point.transition is not None
        return replace(point, transition=replace(point.transition, **changed))

    return change


def other_target(point: ResumePoint) -> ResumePoint:
    assert point.transition is not None
    return other_way(target=point.transition.target * 1.1)(point)


def one_more(point: ResumePoint) -> ResumePoint:
    return replace(point, num_acknowledged=point.num_acknowledged + 1)


def later_epoch(point: ResumePoint) -> ResumePoint:
    return replace(point, counts=replace(point.counts, cache_epoch=point.counts.cache_epoch + 1))


def other_order(point: ResumePoint) -> ResumePoint:
    first, second, *others = point.tail.chunks
    swapped = (
        replace(second, start_frame=first.start_frame),
        replace(first, start_frame=second.start_frame),
    )
    return replace(point, tail=replace(point.tail, chunks=(*swapped, *others)))


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("prompt", other_text),
        ("chunks of the transition", other_way(step=1)),
        ("embeddings", other_target),
        ("chunks shown", one_more),
        ("epoch", later_epoch),
        ("latents", other_order),
    ],
)
def test_a_point_that_changed_before_it_was_saved_is_refused(
    tmp_path: Path,
    what: str,
    change: Callable[[ResumePoint], ResumePoint],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin = SavedResumePoints.begin

    def changed(self: SavedResumePoints, point: ResumePoint, *, log: Log) -> Callable[[], None]:
        is_last = point.counts.next_chunk_index == AT
        return begin(self, change(point) if is_last else point, log=log)

    monkeypatch.setattr(SavedResumePoints, "begin", changed)
    shown, _ = broken(tmp_path, LOST, events=EVENTS)
    with pytest.raises(UserInputError, match=f"is not of the stream in .* \\({what}: saved is"):
        continued(tmp_path, shown)


def test_a_point_in_a_transition_is_resumed(tmp_path: Path) -> None:
    shown, _ = broken(tmp_path, LOST, events=EVENTS)
    stream, first = continued(tmp_path, shown)
    assert first == AT
    assert [chunk.chunk_index for chunk in stream] == list(range(len(stream)))


def test_a_newest_chunk_that_is_not_logged_and_was_planned_otherwise_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = SavedResumePoints.begin

    def changed(self: SavedResumePoints, point: ResumePoint, *, log: Log) -> Callable[[], None]:
        if not point.pending:
            return begin(self, point, log=log)
        *others, newest = point.pending
        envelope = replace(newest.envelope, base_seed=newest.envelope.base_seed + 1)
        point = replace(point, pending=(*others, replace(newest, envelope=envelope)))
        return begin(self, point, log=log)

    monkeypatch.setattr(SavedResumePoints, "begin", changed)
    config = settings_in(tmp_path, record_latents=True)
    with StreamSession(config) as session:
        list(session.stream(PROMPT, num_chunks=AT + 1))
    header = SnapshotStore(tmp_path / "snapshot").header()
    assert header is not None
    os.truncate(tmp_path / "log", header.log_offset)
    with pytest.raises(UserInputError, match=r"\(plan of the newest chunk: saved is PPEnvelope"):
        StreamSession(config.with_settings(resume=True))


@pytest.mark.parametrize("has_it", [False, True])
def test_a_chunk_that_was_saved_and_not_logged_is_logged_by_who_resumes(
    tmp_path: Path, has_it: bool
) -> None:
    """A kill came between its snapshot and its record, before or after the consumer had it."""
    config = settings_in(tmp_path, record_latents=True)
    with StreamSession(config) as session:
        shown = list(session.stream(PROMPT, num_chunks=AT + 1, schedule=[NEW_PROMPT]))
    header = SnapshotStore(tmp_path / "snapshot").header()
    assert header is not None
    os.truncate(tmp_path / "log", header.log_offset)
    assert sorted(read_history(tmp_path / "log").finished) == list(range(AT))
    shown = shown[: AT + has_it]
    with StreamSession(config.with_settings(resume=True)) as session:
        assert session.resumed_at_chunk == AT + 1
        more = session.stream("none", num_chunks=NUM_CHUNKS, acknowledged=lambda: len(shown))
        shown += list(more)
    rebuilt = clean(ScheduledEvent(chunk_index=AT + 1, recompute=True))
    assert as_shown(shown) == as_shown(rebuilt)
    logged = []
    with open(tmp_path / "log", "rb") as file:
        reader = LogReader(file)
        for entry in reader:
            if isinstance(record := entry.record, Finished):
                blob = sha256(reader.blob(entry)).hexdigest()
                logged.append((record.chunk_index, record.num_frames, record.latents_sha256, blob))
    want = [(c.chunk_index, len(c.frames), c.latents_sha256, c.latents_sha256) for c in rebuilt]
    assert logged == want
