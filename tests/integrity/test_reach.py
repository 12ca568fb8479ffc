"""A retraction goes back as far as the detector's own last look: what a sample or the fixed chunk
finds may be older than what a rotation of the state finds."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from scope_contracts.errors import IntegrityError, PeerLostError
from scope_contracts.integrity import suspect_from
from scope_contracts.retraction import Retraction
from scope_rt.control.chunk import Chunk
from scope_rt.control.inbox import Receipt
from scope_rt.control.scheduled_event import ScheduledEvent
from scope_rt.control.transition import Interpolation, TransitionSpec
from scope_rt.control.unverified import Unverified
from scope_rt.faults import FaultPoint
from scope_rt.integrity import verifier
from scope_rt.integrity.canary import Canary
from scope_rt.mesh.reported import Failure
from scope_rt.models.generator import ChunkGenerator
from scope_rt.record.reader import read_history
from scope_rt.record.runs import Runs
from scope_rt.session import StreamSession
from tests.integrity.resumed_streams import (
    LOST,
    NEW_PROMPT,
    What,
    as_shown,
    broken,
    clean,
    continued,
)

EVERY = 2
ROUND = EVERY * 3
"""Chunks within which each call of the model is looked at."""
NUM_CHUNKS, BENT_AT, FIRST, FOUND = 18, 13, 9, 14
"""A call has its turn at `FOUND`, and had it a round before with the chunk before `FIRST`."""
SOFT = TransitionSpec(num_chunks=3, method=Interpolation.LERP, bias_floor=0.5)
CUT_AND_PROMPTS = (
    ScheduledEvent(chunk_index=3, hard_cut=True),
    ScheduledEvent(chunk_index=8, prompt="a blue square", transition=SOFT),
    ScheduledEvent(chunk_index=12, prompt="a green circle"),
)
EVENTS = (NEW_PROMPT, *CUT_AND_PROMPTS)


def bend(generator: ChunkGenerator, *, layer: int) -> None:
    """A layer gives a hundredth more from now on."""

    def more(block: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return output * 1.01

    generator.model.blocks[layer].register_forward_hook(more)


def bent(layer: int) -> What:
    return (FaultPoint.GENERATOR, partial(bend, layer=layer))


def retraction_of(error: Exception) -> Retraction:
    assert isinstance(error, IntegrityError)
    assert error.retraction is not None
    return error.retraction


def as_with_cut_at(first: int, *more: ScheduledEvent, num_chunks: int) -> list[Any]:
    """The same stream, never broken, in which a person asks for the cut."""
    cut = ScheduledEvent(chunk_index=first, hard_cut=True)
    return as_shown(clean(*CUT_AND_PROMPTS, *more, cut, num_chunks=num_chunks))


def test_what_a_sample_finds_is_retracted_from_where_it_looked_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier, "AUDITED_CHUNKS", EVERY)
    shown, error = broken(tmp_path, bent(1), at=BENT_AT, events=EVENTS, num_chunks=NUM_CHUNKS)
    retraction = retraction_of(error)
    assert "layer 1" in retraction.reason
    assert retraction.last_chunk + 1 == len(shown) == FOUND
    assert retraction.first_chunk == FIRST == FOUND - ROUND + 1
    assert read_history(tmp_path / "log").retractions == [retraction]
    stream, first = continued(tmp_path, shown, num_chunks=NUM_CHUNKS)
    assert first == retraction.first_chunk
    assert as_shown(stream) == as_with_cut_at(first, num_chunks=NUM_CHUNKS)


def test_a_sample_speaks_against_chunks_of_an_earlier_process_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier, "AUDITED_CHUNKS", EVERY)
    before, error = broken(tmp_path, LOST, at=FIRST + 1, events=EVENTS, num_chunks=NUM_CHUNKS)
    assert isinstance(error, PeerLostError)
    shown, error = broken(
        tmp_path, bent(1), at=BENT_AT, num_chunks=NUM_CHUNKS, shown=before, resume=True
    )
    retraction = retraction_of(error)
    assert (retraction.first_chunk, retraction.last_chunk) == (FIRST, FOUND - 1)
    stream, first = continued(tmp_path, shown, num_chunks=NUM_CHUNKS)
    assert first == FIRST
    assert as_shown(stream) == as_with_cut_at(first, num_chunks=NUM_CHUNKS)


def test_what_was_posted_is_asked_for_again_also_after_a_second_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first resumed stream fails before it has come to the prompt that was posted."""
    monkeypatch.setattr(verifier, "AUDITED_CHUNKS", EVERY)
    posted: list[Receipt] = []

    def post(session: StreamSession, chunk: Chunk) -> None:
        if chunk.chunk_index == 12:
            posted.append(session.prompt("a yellow square"))

    shown, error = broken(
        tmp_path, bent(1), at=BENT_AT, events=EVENTS, num_chunks=NUM_CHUNKS, each=post
    )
    first = retraction_of(error).first_chunk
    effect = posted[0].wait(0)
    assert effect is not None
    kept = shown[:first]
    again, error = broken(
        tmp_path, LOST, at=FIRST + 1, num_chunks=NUM_CHUNKS, shown=kept, resume=True
    )
    assert isinstance(error, PeerLostError)
    stream, resumed_at = continued(tmp_path, again, num_chunks=NUM_CHUNKS)
    assert resumed_at == FIRST + 1
    yellow = ScheduledEvent(chunk_index=effect.chunk_index, prompt="a yellow square")
    rebuilt = ScheduledEvent(chunk_index=FIRST + 1, recompute=True)
    assert as_shown(stream) == as_with_cut_at(first, yellow, rebuilt, num_chunks=NUM_CHUNKS)


def test_a_kill_before_the_first_new_chunk_loses_nothing_of_what_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier, "AUDITED_CHUNKS", EVERY)
    shown, error = broken(tmp_path, bent(1), at=BENT_AT, events=EVENTS, num_chunks=NUM_CHUNKS)
    first = retraction_of(error).first_chunk
    kept = shown[:first]
    for _ in range(2):
        again, error = broken(
            tmp_path, LOST, at=first, num_chunks=NUM_CHUNKS, shown=kept, resume=True
        )
        assert isinstance(error, PeerLostError)
        assert again == kept
    stream, _ = continued(tmp_path, kept, num_chunks=NUM_CHUNKS)
    assert as_shown(stream) == as_with_cut_at(first, num_chunks=NUM_CHUNKS)


def test_the_fixed_chunk_speaks_against_all_since_its_last_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier, "AUDITED_CHUNKS", 64)  # no call has a turn before it runs
    shown, error = broken(tmp_path, bent(1), at=26, events=EVENTS, num_chunks=36, verify_within=2)
    retraction = retraction_of(error)
    assert "the fixed chunk gives" in retraction.reason
    assert (retraction.first_chunk, retraction.last_chunk) == (16, 31)
    stream, first = continued(tmp_path, shown, num_chunks=36, verify_within=2)
    assert first == 16
    assert as_shown(stream) == as_with_cut_at(first, num_chunks=36)


def test_in_strict_too_and_nothing_is_made_from_that_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[str] = []
    real = Canary.run

    def run(canary: Canary) -> str:
        runs.append(real(canary))
        if len(runs) == 3:
            canary.digest = "another"
        return canary.digest

    monkeypatch.setattr(Canary, "run", run)
    nothing: What = (FaultPoint.GENERATOR, lambda generator: None)
    shown, error = broken(
        tmp_path, nothing, events=EVENTS, num_chunks=36, verify_within=2, integrity="strict"
    )
    retraction = retraction_of(error)
    assert (retraction.first_chunk, retraction.last_chunk) == (16, 31)
    stream, first = continued(tmp_path, shown, num_chunks=36, verify_within=2, integrity="strict")
    assert first == 16
    assert as_shown(stream) == as_with_cut_at(first, num_chunks=36)


def test_other_ranks_are_told_how_far_back() -> None:
    with pytest.raises(IntegrityError) as raised, suspect_from(7):
        raise IntegrityError("chunk 40: rank 1: ...")
    assert Failure.decode(Failure.of(raised.value).encode()).suspect_from == 7


def shown_chunks(within: int) -> Unverified:
    """Chunks 0 to 9 of an earlier process and 10 to 29 of this one; 15 and 16 were dropped."""
    unverified = Unverified(within, next_chunk=10, shown=Runs((index, 0) for index in range(10)))
    for index in range(10, 30):
        if index not in (15, 16):
            unverified.add_shown(index, int(index > 16))
    return unverified


def test_an_error_that_does_not_say_speaks_against_all_of_its_process() -> None:
    for within in (1, 4):
        assert shown_chunks(within).first_suspect(None) == 10


def test_a_younger_error_speaks_against_what_no_rotation_has_verified() -> None:
    assert shown_chunks(4).first_suspect(30) == 27
    assert shown_chunks(64).first_suspect(30) == 10
    assert shown_chunks(1).first_suspect(30) == 30


def test_dropped_chunks_are_not_made_again() -> None:
    unverified = shown_chunks(4)
    retraction = unverified.retract(8, "")
    assert retraction == Retraction(
        first_chunk=8, last_chunk=29, first_epoch=0, last_epoch=1, reason=""
    )
    assert unverified.cut_of(retraction) == (8, 20)


def test_a_second_error_retracts_only_what_is_older() -> None:
    unverified = shown_chunks(4)
    later = unverified.retract(27, "")
    assert unverified.retract(28, "") is None
    found = unverified.retract(12, "")
    assert found is not None
    assert later is not None
    assert (found.first_chunk, found.last_chunk) == (12, 26)
    assert unverified.cut_of(found) == (12, 13)
    assert found.followed_by(later).last_chunk == 29


def test_chunks_of_another_stream_are_named_and_not_made_again() -> None:
    unverified = shown_chunks(8)
    unverified.begin(30)
    unverified.add_shown(30, 2)
    retraction = unverified.retract(unverified.first_suspect(31), "")
    assert retraction is not None
    assert (retraction.first_chunk, retraction.last_chunk) == (24, 30)
    assert unverified.cut_of(retraction) == (30, 1)
