"""A journal tells what was shown, and only what is whole; it says who may go on with a stream."""

from pathlib import Path

import numpy as np
import pytest

from scope_contracts.errors import RecordingError, UserInputError
from scope_runners.job import OutputFiles
from scope_runners.journal import Journal, Told, check_same_stream, read
from scope_runners.leftovers import is_finished
from scope_runners.request import parse_stream_request
from scope_runners.show import Standing
from scope_runners.summary import ChunkRecord
from tests.video.test_full_disk import largest_file

REQUEST = parse_stream_request(["--prompt", "a red circle", "--seconds", "3"])


def record(index: int) -> ChunkRecord:
    return ChunkRecord(
        chunk_index=index,
        cache_epoch=0,
        prompt="a red circle",
        latents_sha256="",
        frames=12,
        generator_calls=5,
        recomputed=False,
        kv_cache_attention_bias=1.0,
        stage_ms={},
    )


def told_of(path: Path, *, num_chunks: int, publish: bool = False) -> Told:
    journal = Journal(path, REQUEST, (), 0)
    picture = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    for index in range(num_chunks):
        journal.add(record(index), picture if index == 0 else None)
    if publish:
        journal.publish()
    journal.close()
    return read(path)


def test_what_was_told_is_read_and_a_torn_line_is_not(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    told_of(path, num_chunks=2)
    with path.open("ab") as file:
        file.write(b'{"chunk": {"chunk_index": 2')
    told = read(path)
    assert [chunk.chunk_index for chunk, _ in told.entries] == [0, 1]
    first, second = (picture for _, picture in told.entries)
    assert first is not None
    assert first[1, 1].tolist() == [9, 10, 11]
    assert second is None


@pytest.mark.parametrize("line", [b"\0\0\0", b"[]", b'{"chunk": {"x": 1}}', b'{"chunk": 3}'])
def test_a_damaged_journal_is_refused_in_one_sentence(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "journal"
    path.write_bytes(line + b"\n")
    with pytest.raises(UserInputError, match=r"is damaged .*; delete it to start the stream anew"):
        read(path)


def test_every_start_is_counted_and_chunks_that_are_not_kept_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    told = told_of(path, num_chunks=3)
    assert told.num_starts == 1
    Journal(path, REQUEST, told.entries[:2], told.num_starts).close()
    again = read(path)
    assert (again.num_starts, len(again.entries)) == (2, 2)


def test_another_prompt_may_not_go_on_with_a_stream(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    told = told_of(path, num_chunks=1)
    longer = parse_stream_request(["--prompt", "a red circle", "--seconds", "9"])
    check_same_stream(told, longer, path)
    other = parse_stream_request(["--prompt", "a white circle", "--seconds", "3"])
    with pytest.raises(UserInputError, match=r"--prompt is 'a white circle', .* 'a red circle'"):
        check_same_stream(told, other, path)


@pytest.mark.parametrize(
    ("flag", "value", "was"),
    [("--transition-method", "lerp", "'slerp'"), ("--transition-bias", "0.5", "None")],
)
def test_another_transition_may_not_go_on_with_a_stream(
    tmp_path: Path, flag: str, value: str, was: str
) -> None:
    told = told_of(tmp_path / "journal", num_chunks=1)
    other = parse_stream_request(["--prompt", "a red circle", flag, value])
    with pytest.raises(UserInputError, match=f"{flag} is .*, .* begun with {was}"):
        check_same_stream(told, other, tmp_path / "journal")


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", REQUEST, (), 0)
    with largest_file(600), pytest.raises(RecordingError, match="free disk space"):
        for index in range(20):
            journal.add(record(index), None)
    journal.close()


@pytest.mark.parametrize(
    ("is_finished", "held", "num_kept"),
    [(False, 2, 2), (False, 3, 3), (True, 0, 3), (False, 0, 0)],
    ids=["chunks not held are made again", "not yet joined", "joined", "segments lost"],
)
def test_only_what_is_held_or_published_stays(
    tmp_path: Path, *, is_finished: bool, held: int, num_kept: int
) -> None:
    told = told_of(tmp_path / "journal", num_chunks=3)
    standing = Standing.of(told, held_chunks=held, is_finished=is_finished)
    assert (standing.is_published, len(standing.kept)) == (is_finished, num_kept)


@pytest.mark.parametrize(
    ("published", "video", "num_held", "is_whole"),
    [
        (True, True, 0, True),
        (False, True, 0, False),
        (True, False, 0, False),
        (True, True, 1, False),
        (None, True, 0, True),
    ],
    ids=["joined", "still written", "no video", "chunks not yet joined", "nothing is told of it"],
)
def test_a_video_is_finished_when_it_is_there_and_no_chunk_lies_beside_it(
    tmp_path: Path,
    *,
    published: bool | None,
    video: bool,
    num_held: int,
    is_whole: bool,
) -> None:
    files = OutputFiles(video=tmp_path / "a.mp4", trace=None)
    if published is not None:
        told_of(files.journal, num_chunks=3, publish=published)
    if video:
        files.video.write_bytes(b"a video, maybe of an earlier stream")
    lines = ['{"format": {}}', *['{"end_bytes": 9, "num_frames": 12}'] * num_held, '{"end_byt']
    (tmp_path / ".a.mp4.partial.jsonl").write_text("\n".join(lines))
    assert is_finished(read(files.journal), files) == is_whole


def test_a_published_stream_that_is_taken_up_is_still_published(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    told = told_of(path, num_chunks=3, publish=True)
    Journal(path, REQUEST, told.entries, told.num_starts, is_published=True).close()
    assert read(path).is_published
    standing = Standing.of(read(path), held_chunks=0, is_finished=True)
    assert (standing.is_published, len(standing.kept), standing.num_starts) == (True, 3, 2)


def test_a_video_that_holds_more_than_was_told_is_refused(tmp_path: Path) -> None:
    told = told_of(tmp_path / "journal", num_chunks=1)
    with pytest.raises(UserInputError, match="holds 2 chunks and its journal tells of 1"):
        Standing.of(told, held_chunks=2, is_finished=False)
