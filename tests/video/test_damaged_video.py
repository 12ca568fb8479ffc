"""What was damaged since a recording was left is cut off or named, and never published."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from scope_contracts.errors import RecordingError, UserInputError
from scope_rt.file_digest import FileDigest
from scope_rt.record.reader import read_history
from tests.video.grey_video import (
    STARTS,
    finish,
    frame_numbers,
    log_of,
    suspended,
    write_chunks,
    writer_for,
)


def test_a_log_torn_anywhere_yields_the_whole_chunks_before(tmp_path: Path) -> None:
    path = tmp_path / "video.mp4"
    suspended(path, 3)
    content, log = log_of(path).read_bytes(), log_of(path)
    ends = []
    for size in range(0, len(content), 7):
        log.write_bytes(content[:size])
        ends.append(len(read_history(log).durable))
    assert ends == sorted(ends)
    assert set(ends) == {0, 1, 2}
    log.write_bytes(content[:-1])
    suspended(path, 4)
    assert finish(path) == list(range(STARTS[-1]))


def test_packets_of_an_unfinished_chunk_never_reach_the_video(tmp_path: Path) -> None:
    path = tmp_path / "video.mp4"
    suspended(path, 3)
    os.truncate(log_of(path), log_of(path).stat().st_size - 1)
    with writer_for(path) as writer:
        assert writer.earlier_chunks == 2
    assert frame_numbers(path) == list(range(STARTS[2]))


def cut_segment(folder: Path) -> None:
    os.truncate(folder / ".video.mp4.0.partial.nut", 300)


def remove_segment(folder: Path) -> None:
    (folder / ".video.mp4.0.partial.nut").unlink()


def flip_a_bit(folder: Path) -> None:
    """In a frame, where a player would only show it a little different."""
    segment = folder / ".video.mp4.0.partial.nut"
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)


def swap_segments(folder: Path) -> None:
    segment = folder / ".video.mp4.0.partial.nut"
    suspended(folder / "other.mp4", 3, first=3)
    (folder / ".other.mp4.0.partial.nut").replace(segment)


@pytest.mark.parametrize("damage", [cut_segment, remove_segment, flip_a_bit, swap_segments])
def test_a_damaged_recording_is_refused_before_generation(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    path = tmp_path / "video.mp4"
    suspended(path, 3)
    damage(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserInputError, match="is damaged"):
        writer_for(path)
    assert sorted(tmp_path.iterdir()) == before


def test_a_bit_that_flips_before_the_join_is_named_and_not_published(tmp_path: Path) -> None:
    path = tmp_path / "video.mp4"
    writer = writer_for(path)
    write_chunks(writer, 3)
    writer.drain()
    flip_a_bit(tmp_path)
    with pytest.raises(
        RecordingError, match=r"of chunk 0, are others than were written\); its chunks stay"
    ):
        writer.close()
    assert not path.exists()
    assert not read_history(log_of(path)).is_published


def whole_bytes(path: Path) -> int:
    """Where the last whole chunk of segment 0 ends."""
    return max(done.end_bytes for done in read_history(log_of(path)).durable.values())


def test_no_byte_of_a_segment_can_be_flipped_without_a_word(tmp_path: Path) -> None:
    """Its header holds sizes, flags and the encoder's header, none of which is in a packet."""
    path = tmp_path / "video.mp4"
    suspended(path, 2)
    segment = tmp_path / ".video.mp4.0.partial.nut"
    whole, end = segment.read_bytes(), whole_bytes(path)
    places = {*range(0, min(end, 400), 5), *range(0, end, 97), end - 1}
    for place in sorted(places):
        segment.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        with pytest.raises(UserInputError, match=r"is damaged \(.*chunk \d, are others than"):
            writer_for(path)
    segment.write_bytes(whole)
    assert finish(path) == list(range(STARTS[-1]))


def test_a_flip_behind_the_last_whole_chunk_is_never_read(tmp_path: Path) -> None:
    path = tmp_path / "video.mp4"
    suspended(path, 2)
    segment = tmp_path / ".video.mp4.0.partial.nut"
    whole, end = segment.read_bytes(), whole_bytes(path)
    assert end < len(whole), "FFmpeg's index comes behind the packets"
    segment.write_bytes(whole[:end] + bytes(byte ^ 255 for byte in whole[end:]))
    assert finish(path) == list(range(STARTS[-1]))


def test_damage_in_the_segment_of_any_life_keeps_the_video_from_being_joined(
    tmp_path: Path,
) -> None:
    path = tmp_path / "video.mp4"
    for num_chunks in (2, 4):
        suspended(path, num_chunks)
    writer = writer_for(path)
    write_chunks(writer, 5)
    writer.drain()
    parts = sorted(tmp_path.glob(".video.mp4.*.nut"))
    assert len(parts) == 3
    data = bytearray(parts[1].read_bytes())
    data[40] ^= 1
    parts[1].write_bytes(data)
    with pytest.raises(RecordingError, match=r"\.1\.partial\.nut: bytes 0 to \d+, of chunk 2"):
        writer.close()
    assert sorted(tmp_path.iterdir()) == parts, "what is whole stays, and nothing half joined"


def test_the_log_knows_what_the_video_holds(tmp_path: Path) -> None:
    path = tmp_path / "video.mp4"
    suspended(path, 2)
    writer = writer_for(path)
    writer.close()
    published = read_history(log_of(path)).published
    assert published is not None
    assert FileDigest.of(path) == writer.published == published
