"""What rank0 keeps of a stream, to rebuild a cache or to resume, is what arrived."""

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from scope_contracts.errors import IntegrityError, UserInputError
from scope_rt.checks import Checks
from scope_rt.config import StreamConfig
from scope_rt.control import saving
from scope_rt.control.chunk import Chunk
from scope_rt.control.context import ContextMemory
from scope_rt.control.scheduled_event import ScheduledEvent
from scope_rt.control.tail import TailChunk
from scope_rt.faults import FaultPoint
from scope_rt.session import StreamSession
from tests.integrity.audited import nothing
from tests.integrity.rank0_streams import AT, UNTOUCHED, WITHIN, pixels, shown_with
from tests.tiny_folder import KREA_RECIPE, tiny_folder, write_tiny_folder

RECOMPUTED = ScheduledEvent(chunk_index=AT, recompute=True)


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


@pytest.mark.parametrize("part", ["_recent", "_sinks"])
def test_context_that_changes_while_it_is_kept_is_not_recomputed_from(part: str) -> None:
    def change(session: StreamSession, chunk: Chunk) -> None:
        if chunk.chunk_index == AT - 1:
            assert session._context is not None
            with torch.inference_mode():
                getattr(session._context, part).view(-1)[7] += 1e-3

    clean = shown_with(UNTOUCHED, events=[RECOMPUTED])
    shown: list[Chunk] = []
    said = f"chunk {AT}: rank 0: the context of a recompute changed"
    with pytest.raises(IntegrityError, match=said):
        shown_with(UNTOUCHED, shown=shown, each=change, events=[RECOMPUTED])
    assert pixels(shown) == pixels(clean[:AT])


@pytest.mark.parametrize("mode", ["r0", "r0a"])
def test_a_recompute_model_recomputes_from_what_arrived(tmp_path: Path, mode: str) -> None:
    folder = write_tiny_folder(tmp_path, KREA_RECIPE)

    def change(session: StreamSession, chunk: Chunk) -> None:
        if chunk.chunk_index == AT - 1:
            assert isinstance(session._context, ContextMemory)
            kept = (
                session._context._anchor_frames.frames
                if mode == "r0a"
                else session._context._recent
            )
            with torch.inference_mode():
                kept.view(-1)[7] += 1

    settings: dict[str, Any] = {"model": folder, "recompute": mode, "integrity": "strict"}
    assert len(shown_with(UNTOUCHED, num_chunks=AT + 5, **settings)) == AT + 5
    shown: list[Chunk] = []
    said = "frames of the anchor" if mode == "r0a" else "the context of a recompute"
    with pytest.raises(IntegrityError, match=f"chunk {AT}: rank 0: {said} changed"):
        shown_with(UNTOUCHED, shown=shown, each=change, **settings)
    assert len(shown) == AT


def spoil_tail(patch: pytest.MonkeyPatch) -> None:
    """The copy of a chunk's latents that is saved changes before that."""
    numbers = count()

    def spoiled(**fields: Any) -> TailChunk:
        if next(numbers) == AT:
            fields["latents"].add_(1e-3)
        return TailChunk(**fields)

    patch.setattr(saving, "TailChunk", spoiled)


@pytest.mark.parametrize(
    ("what", "records", "spoils"),
    [
        ("latents for the recording changed", True, Spoiled()),
        ("latents for the resume point changed", False, None),
        ("hands out latents_sha256", False, Spoiled()),
    ],
    ids=["recording", "snapshot", "after it was saved"],
)
def test_latents_that_are_kept_are_those_that_were_shown(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    records: bool,
    spoils: Spoiled | None,
) -> None:
    files: dict[str, Any] = {"log": tmp_path / "log", "snapshot": tmp_path / "snapshot"}
    files["record_latents"] = records
    shown: list[Chunk] = []
    with monkeypatch.context() as patch:
        if spoils is None:
            spoil_tail(patch)
        with pytest.raises(IntegrityError, match=f"chunk {AT}: rank 0: {what}"):
            shown_with(spoils or UNTOUCHED, shown=shown, **files)
    assert len(shown) == AT
    with StreamSession(
        StreamConfig.of(tiny_folder(), resume=True, verify_within=WITHIN, **files)
    ) as session:
        first = session.resumed_at_chunk
        again = list(session.stream("none", num_chunks=AT + 3, acknowledged=lambda: first or 0))
    assert [chunk.chunk_index for chunk in again] == list(range(first or 0, AT + 3))


def test_a_snapshot_of_latents_that_had_changed_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: dict[str, Any] = {"log": tmp_path / "log", "snapshot": tmp_path / "snapshot"}
    with monkeypatch.context() as patch:
        spoil_tail(patch)
        off = replace(Checks(), kept=nothing)
        shown_with(UNTOUCHED, checks=off, num_chunks=AT + 1, **files)
    with pytest.raises(UserInputError, match="latents that were damaged before they were saved"):
        StreamSession(StreamConfig.of(tiny_folder(), resume=True, **files))


def test_cuts_prompts_and_recomputes_are_no_false_alarm_in_strict() -> None:
    def steer(session: StreamSession, chunk: Chunk) -> None:
        if chunk.chunk_index == 4:
            session.hard_cut()
        if chunk.chunk_index == 7:
            session.prompt("a white triangle")

    events = [ScheduledEvent(chunk_index=2, hard_cut=True), RECOMPUTED]
    shown = shown_with(
        UNTOUCHED, num_chunks=12, events=events, each=steer, integrity="strict", verify_within=1
    )
    assert len(shown) == 12
    assert [chunk.cache_epoch for chunk in shown][-1] == 2
