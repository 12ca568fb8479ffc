"""A resume point that is not of its log is not resumed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scope_contracts.errors import UserInputError
from scope_rt.control.inbox import Conditioning
from scope_rt.control.resume_point import ResumePoint
from scope_rt.control.saved_points import SavedResumePoints
from scope_rt.control.scheduled_event import ScheduledEvent
from scope_rt.control.transition import Interpolation, TransitionSpec
from scope_rt.record.log import Log
from tests.integrity.resumed_streams import AT, LOST, broken, continued

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
    save = SavedResumePoints.save

    def changed(self: SavedResumePoints, point: ResumePoint, *, log: Log) -> None:
        is_last = point.counts.next_chunk_index == AT
        save(self, change(point) if is_last else point, log=log)

    monkeypatch.setattr(SavedResumePoints, "save", changed)
    shown, _ = broken(tmp_path, LOST, events=EVENTS)
    with pytest.raises(UserInputError, match=f"is not of the stream in .* \\({what}: saved is"):
        continued(tmp_path, shown)


def test_a_point_in_a_transition_is_resumed(tmp_path: Path) -> None:
    shown, _ = broken(tmp_path, LOST, events=EVENTS)
    stream, first = continued(tmp_path, shown)
    assert first == AT
    assert [chunk.chunk_index for chunk in stream] == list(range(len(stream)))
