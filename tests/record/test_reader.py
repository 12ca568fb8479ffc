"""A log is read as the one stream that was seen; what a resume planned again is no part of it."""

from pathlib import Path

import pytest

from scope_contracts.errors import UserInputError
from scope_contracts.log_file import pack
from scope_contracts.log_records import Begun, Closed, Published, Retracted, Scheduled
from scope_contracts.retraction import Retraction
from scope_lab.sample_log import durable, finished, opened, planned, segment, story, write
from scope_rt.record.progress import StreamProgress
from scope_rt.record.reader import read_history, read_progress, video_records


def test_a_log_tells_how_far_its_stream_is(tmp_path: Path) -> None:
    history = read_history(write(tmp_path / "a.scope", story()))
    assert history.num_starts == 2
    assert history.begun == Begun(at_s=1000.0, prompt="a red circle")
    assert [event.chunk_index for event in history.scheduled] == [6]
    assert sorted(history.finished) == [0, 1, 2, 3, 4, 6, 7]
    assert (sorted(history.durable), len(history.segments)) == ([0], 1)
    assert history.is_published
    assert history.closed
    assert history.num_bytes == (tmp_path / "a.scope").stat().st_size


def test_a_resume_takes_back_what_was_logged_from_its_chunk_on(tmp_path: Path) -> None:
    records = [
        *[(opened(), b""), (Begun(at_s=0.0, prompt="a"), b""), (segment(), b"")],
        *[(planned(0), b""), finished(0), (durable(0), b"")],
        *[(planned(1), b""), finished(1), (durable(1), b"")],
        *[(opened(resumed_at_chunk=1), b""), (segment(1), b"")],
    ]
    history = read_history(write(tmp_path / "a.scope", records))
    assert (sorted(history.finished), sorted(history.durable)) == ([0], [0])
    assert [each.number for each in history.segments] == [0, 1]
    assert (history.num_starts, history.num_lost, history.is_published) == (2, 1, False)


def test_what_is_whole_of_the_video_is_told_while_the_log_is_written(tmp_path: Path) -> None:
    begun = [(opened(), b""), (segment(), b""), finished(0), (durable(0), b""), (durable(1), b"")]
    again = [(opened(resumed_at_chunk=1), b""), (segment(1), b""), (durable(1, segment=1), b"")]
    path = write(tmp_path / "a.scope", [*begun, *again])
    progress = read_progress(path)
    with path.open("ab") as file:  # half a record, and then the other half
        file.write(pack(durable(2, segment=1))[:20] + pack(durable(3, segment=1)))
    told = list(video_records(path, progress))
    assert told == [segment(), durable(0), segment(1), durable(1, segment=1)]
    assert list(video_records(path, StreamProgress())) == []


def test_a_snapshot_from_before_a_retraction_still_has_what_that_names(tmp_path: Path) -> None:
    """Also one from right before it: a kill came between the record and the next snapshot."""
    begun = [(opened(), b""), (Begun(at_s=0.0, prompt="a"), b"")]
    made = [*begun, *[record for i in range(3) for record in ((planned(i), b""), finished(i))]]
    offset = write(tmp_path / "before", made).stat().st_size
    found = Retraction(first_chunk=1, last_chunk=2, first_epoch=0, last_epoch=0, reason="")
    retracted = Retracted(at_s=0.0, retraction=found)
    progress = read_progress(write(tmp_path / "a.scope", [*made, (retracted, b"")]))
    assert progress.first_suspect(next_chunk=3, log_offset=offset) == 1
    assert progress.first_suspect(next_chunk=3, log_offset=offset + 1) is None
    assert progress.first_suspect(next_chunk=1, log_offset=offset) is None


def test_another_stream_call_has_its_own_schedule(tmp_path: Path) -> None:
    records = [
        *[(opened(), b""), (Begun(at_s=0.0, prompt="a"), b"")],
        *[(Scheduled(at_s=0.0, chunk_index=3, hard_cut=True), b"")],
        *[(Begun(at_s=0.0, prompt="b"), b""), (Scheduled(at_s=0.0, chunk_index=9), b"")],
    ]
    history = read_history(write(tmp_path / "a.scope", records))
    assert history.begun is not None
    assert history.begun.prompt == "b"
    assert [event.chunk_index for event in history.scheduled] == [9]


@pytest.mark.parametrize("content", [None, b"", b"\x89SCO"])
def test_where_no_record_is_whole_there_is_no_stream(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "a.scope").write_bytes(content)
    assert read_history(tmp_path / "a.scope").num_starts == 0


@pytest.mark.parametrize("num_lost", [1, 100])
def test_a_torn_last_record_is_left_out_and_counted(tmp_path: Path, num_lost: int) -> None:
    path = write(tmp_path / "a.scope", story()[:-1])
    num_bytes = path.stat().st_size
    last = pack(*finished(8, values=range(50)))
    path.write_bytes(path.read_bytes() + last[:-num_lost])
    history = read_history(path)
    assert (history.num_bytes, history.torn_bytes) == (num_bytes, len(last) - num_lost)
    assert 8 not in history.finished


def test_latents_are_stepped_over_and_records_are_checked(tmp_path: Path) -> None:
    path = write(tmp_path / "a.scope", [(opened(), b""), finished(0, values=range(9))])
    in_latents = path.stat().st_size - 1
    path.write_bytes(
        path.read_bytes()
        + pack(Published(at_s=0.0, num_bytes=0, digest=""))
        + pack(Closed(at_s=0.0))
    )
    whole = path.read_bytes()

    def flipped(position: int) -> bytes:
        return whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :]

    path.write_bytes(flipped(in_latents))
    assert read_history(path).closed
    path.write_bytes(flipped(in_latents + 12))
    with pytest.raises(UserInputError, match=r"is damaged .*; to start the stream anew, delete"):
        read_history(path)


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.scope").write_bytes(b"my holiday notes")
    with pytest.raises(UserInputError, match="is no recording"):
        read_history(tmp_path / "a.scope")
    with pytest.raises(UserInputError, match="is no ordinary file"):
        read_history(tmp_path)
