"""After an error of integrity nothing is made from what is not verified, and nobody keeps it
unknowingly; after a loss the stream continues from its context."""

import errno
import os
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from scope_contracts.errors import (
    DamageError,
    FingerprintError,
    IntegrityError,
    PeerLostError,
    ScopeError,
    UserInputError,
)
from scope_contracts.log_file import Entry, LogReader
from scope_contracts.log_records import Finished
from scope_contracts.retraction import Retraction
from scope_rt.control.chunk import Chunk
from scope_rt.control.scheduled_event import ScheduledEvent
from scope_rt.faults import FaultPoint
from scope_rt.instruments import Instruments
from scope_rt.record.reader import read_history
from scope_rt.record.snapshot import SnapshotStore
from scope_rt.session import StreamSession
from scope_rt.video.writer import VideoWriter
from tests.integrity.corruption import PROMPT, Change
from tests.integrity.resumed_streams import (
    AT,
    FLIPPED,
    LOST,
    NAN,
    NEW_PROMPT,
    NUM_CHUNKS,
    WITHIN,
    Both,
    What,
    as_shown,
    broken,
    clean,
    continued,
    flip_weight,
    settings_in,
)


@pytest.mark.parametrize("what", [FLIPPED, NAN], ids=["flipped weight", "NaN"])
def test_nothing_of_an_unverified_context_survives(tmp_path: Path, what: What) -> None:
    shown, error = broken(tmp_path, what)
    assert isinstance(error, IntegrityError)
    retraction = error.retraction
    assert retraction is not None
    assert retraction.last_chunk == len(shown) - 1
    assert retraction.first_chunk == len(shown) + 1 - WITHIN <= AT
    assert "chunk" in retraction.reason
    stream, first = continued(tmp_path, shown)
    assert first == retraction.first_chunk
    cut = ScheduledEvent(chunk_index=first, hard_cut=True)
    if first == NEW_PROMPT.chunk_index:
        cut = ScheduledEvent(chunk_index=first, hard_cut=True, prompt=NEW_PROMPT.prompt)
    assert as_shown(stream) == as_shown(clean(cut))


def test_the_record_and_the_next_session_name_what_was_retracted(tmp_path: Path) -> None:
    _, error = broken(tmp_path, NAN)
    assert isinstance(error, IntegrityError)
    history = read_history(tmp_path / "log")
    assert history.retractions == [error.retraction]
    suspect = [i for i, finished in history.finished.items() if history.is_retracted(finished)]
    assert suspect == [3, 4, 5]
    with StreamSession(settings_in(tmp_path, resume=True)) as session:
        assert session.retractions == (error.retraction,)
        assert session.resumed_at_chunk == 3
        for _ in session.stream("none", num_chunks=NUM_CHUNKS, acknowledged=lambda: 3):
            pass
    history = read_history(tmp_path / "log")
    assert history.retractions == [error.retraction]
    assert sorted(history.finished) == list(range(NUM_CHUNKS))
    assert not any(history.is_retracted(finished) for finished in history.finished.values())


def test_a_loss_is_no_retraction_and_continues_from_context(tmp_path: Path) -> None:
    shown, error = broken(tmp_path, LOST)
    assert not isinstance(error, IntegrityError)
    assert read_history(tmp_path / "log").retractions == []
    stream, first = continued(tmp_path, shown)
    assert first == AT
    assert {chunk.cache_epoch for chunk in stream} == {0}
    rebuilt = clean(ScheduledEvent(chunk_index=first, recompute=True))
    assert as_shown(stream) == as_shown(rebuilt)


def test_in_strict_what_was_shown_is_verified_and_continues_from_context(tmp_path: Path) -> None:
    shown, error = broken(tmp_path, FLIPPED, integrity="strict")
    assert isinstance(error, IntegrityError)
    assert error.retraction is None
    assert len(shown) == AT
    stream, first = continued(tmp_path, shown, integrity="strict")
    assert first == AT
    assert {chunk.cache_epoch for chunk in stream} == {0}
    assert as_shown(stream) == as_shown(clean(ScheduledEvent(chunk_index=AT, recompute=True)))


@pytest.mark.parametrize("at", [0, 2])
def test_a_stream_that_has_no_verified_chunk_begins_again(tmp_path: Path, at: int) -> None:
    shown, error = broken(tmp_path, NAN, at=at)
    assert isinstance(error, IntegrityError)
    assert len(shown) == at
    stream, first = continued(tmp_path, shown)
    assert first == 0
    assert [chunk.chunk_index for chunk in stream] == list(range(NUM_CHUNKS))
    assert {chunk.cache_epoch for chunk in stream} == {1}


def test_a_chunk_that_is_made_again_is_never_mistaken_for_the_retracted_one(
    tmp_path: Path,
) -> None:
    seen = set[tuple[int, int]]()
    for resume in (None, True, True):
        shown, error = broken(tmp_path, NAN, at=5, resume=resume)
        assert isinstance(error, IntegrityError)
        ids = {(chunk.chunk_index, chunk.cache_epoch) for chunk in shown}
        retraction = error.retraction
        assert retraction is not None
        retracted = {each for each in ids if retraction.covers(*each)}
        assert len(retracted) == WITHIN - 1
        assert not retracted & seen
        seen |= retracted


def test_a_hard_cut_among_the_retracted_chunks_happens_again(tmp_path: Path) -> None:
    cut = ScheduledEvent(chunk_index=5, hard_cut=True)
    shown, error = broken(tmp_path, NAN, events=[cut])
    assert isinstance(error, IntegrityError)
    assert error.retraction is not None
    assert (error.retraction.first_epoch, error.retraction.last_epoch) == (0, 1)
    stream, first = continued(tmp_path, shown)
    assert first == 3
    epochs = [chunk.cache_epoch for chunk in stream]
    assert epochs == [0] * 3 + [2] * 2 + [3] * (NUM_CHUNKS - 5)


def test_a_snapshot_from_before_a_retraction_continues_before_what_was_retracted(
    tmp_path: Path,
) -> None:
    """As after a kill between the record and the snapshot."""
    real_begin = SnapshotStore.begin
    with pytest.MonkeyPatch.context() as patch:

        def begin(store: SnapshotStore, header: Any, state: Any, **log: Any) -> Any:
            if header.next_chunk_index != 3 or not read_history(tmp_path / "log").retractions:
                return real_begin(store, header, state, **log)
            return lambda: None

        patch.setattr(SnapshotStore, "begin", begin)
        shown, error = broken(tmp_path, NAN)
    assert isinstance(error, IntegrityError)
    header = SnapshotStore(tmp_path / "snapshot").header()
    assert header is not None
    assert header.next_chunk_index > 3
    stream, first = continued(tmp_path, shown)
    assert first == 3
    assert as_shown(stream) == as_shown(clean(ScheduledEvent(chunk_index=3, hard_cut=True)))
    assert read_history(tmp_path / "log").retractions == [error.retraction]


def shown_until(place: Path, faults: Any) -> tuple[list[Chunk], ScopeError]:
    shown: list[Chunk] = []
    with (
        pytest.raises(ScopeError) as raised,
        StreamSession(settings_in(place), instruments=Instruments(faults=faults)) as session,
    ):
        for chunk in session.stream(
            PROMPT,
            num_chunks=NUM_CHUNKS,
            schedule=[NEW_PROMPT],
            acknowledged=lambda: max(0, len(shown) - 2),
        ):
            shown.append(chunk)
    return shown, raised.value


def test_what_is_found_as_a_wrong_stream_ends_retracts_nothing_twice(tmp_path: Path) -> None:
    shown, error = shown_until(tmp_path, Both(*(Change(w[0], AT, w[1]) for w in (FLIPPED, NAN))))
    assert isinstance(error, FingerprintError)
    assert isinstance(error.__context__, IntegrityError)
    assert error.retraction is not None
    assert read_history(tmp_path / "log").retractions == [error.__context__.retraction]
    stream, first = continued(tmp_path, shown)
    assert first == error.retraction.first_chunk == 3
    assert as_shown(stream) == as_shown(clean(ScheduledEvent(chunk_index=3, hard_cut=True)))


def fill_disk(data: bytes) -> bytes:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_after_the_log_has_failed_no_cut_leads_beyond_its_end(tmp_path: Path) -> None:
    full = Change(FaultPoint.RECORD, 1, fill_disk)
    shown, error = shown_until(tmp_path, Both(full, Change(NAN[0], AT, NAN[1])))
    assert isinstance(error, IntegrityError)
    stream, first = continued(tmp_path, shown)
    assert first < 3  # saved before the log failed, and long verified
    assert as_shown(stream) == as_shown(clean(ScheduledEvent(chunk_index=first, recompute=True)))
    assert sorted(read_history(tmp_path / "log").finished) == list(range(NUM_CHUNKS))


def test_a_video_that_was_finished_before_its_session_is_not_called_damaged(tmp_path: Path) -> None:
    out, last = tmp_path / "a.mp4", AT
    size: dict[str, Any] = {"width": 32, "height": 16, "fps": 16}
    changed = Instruments(faults=Change(FaultPoint.GENERATOR, last, flip_weight))
    with (
        pytest.raises(IntegrityError),
        StreamSession(settings_in(tmp_path), instruments=changed) as session,
        VideoWriter(out, **size, ledger=session.take_log()) as writer,
    ):
        for chunk in session.stream(PROMPT, num_chunks=last + 1):
            writer.write(chunk.frames, chunk_index=chunk.chunk_index)
    session.log.close()
    assert out.exists()
    with (
        StreamSession(settings_in(tmp_path, resume=True)) as session,
        pytest.raises(UserInputError, match=r"was finished before its session .* close a session"),
    ):
        VideoWriter(out, **size, earlier=session.earlier_video())


def test_a_damaged_log_is_no_reason_to_retract(tmp_path: Path) -> None:
    lost = Change(LOST[0], AT, LOST[1])
    config = settings_in(tmp_path, record_latents=True)
    with (
        pytest.raises(PeerLostError),
        StreamSession(config, instruments=Instruments(faults=lost)) as session,
    ):
        list(session.stream(PROMPT, num_chunks=NUM_CHUNKS))
    log = tmp_path / "log"
    data = bytearray(log.read_bytes())
    (end,) = (entry.end for entry in LogReader(BytesIO(data)) if is_finished(entry, 2))
    data[end - 100] ^= 1  # in its latents, which no resume reads
    log.write_bytes(data)
    with (
        pytest.raises(DamageError) as raised,
        StreamSession(settings_in(tmp_path, resume=True, record_latents=True)) as session,
    ):
        list(session.stream(PROMPT, num_chunks=NUM_CHUNKS))
    assert raised.value.retraction is None
    assert read_history(log).retractions == []


def is_finished(entry: Entry, chunk: int) -> bool:
    return isinstance(entry.record, Finished) and entry.record.chunk_index == chunk


def test_a_retraction_covers_its_own_epochs_only() -> None:
    retraction = Retraction(first_chunk=3, last_chunk=5, first_epoch=1, last_epoch=2, reason="")
    assert retraction.covers(3, 1)
    assert retraction.covers(5, 2)
    assert not retraction.covers(5, 3)
    assert not retraction.covers(2, 1)
    assert not retraction.covers(6, 2)
