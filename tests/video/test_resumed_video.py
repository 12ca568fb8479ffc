"""Every frame is a flat grey that tells its number, so that a decoded video can be read back."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from scope_contracts.errors import RecordingError, UserInputError
from scope_rt.record.reader import StreamHistory, read_history
from scope_rt.record.stream_log import StreamLog
from scope_rt.video.encoder import SegmentEncoder
from scope_rt.video.writer import VideoWriter, check_recordable
from tests.stream_logs import opened

SIDE = 64
FPS = 16
SUFFIXES = pytest.mark.parametrize("suffix", [".mp4", ".webm"])
# As a streaming decoder emits them: an epoch's first chunk is shorter than the others.
CHUNK_SIZES = (5, 8, 8, 8, 5, 8, 8, 8)
STARTS = [sum(CHUNK_SIZES[:index]) for index in range(len(CHUNK_SIZES) + 1)]

WRITE_CHUNKS = """
import os, signal, sys
from pathlib import Path
import numpy as np
from scope_rt.record.reader import StreamHistory, read_history
from scope_rt.record.stream_log import StreamLog
from scope_rt.video.encoder import SegmentEncoder
from scope_rt.video.segments import VideoSegments
from tests.video.test_resumed_video import LoggedWriter

def die(*args, **options):
    os.kill(os.getpid(), signal.SIGKILL)

def greys(first, count):
    numbers = range(first, first + count)
    return np.stack([np.full((64, 64, 3), 4 * number + 4, np.uint8) for number in numbers])
"""


def greys(chunk_index: int) -> NDArray[np.uint8]:
    """The frames THWC of a chunk."""
    numbers = range(STARTS[chunk_index], STARTS[chunk_index + 1])
    return np.stack([np.full((SIDE, SIDE, 3), 4 * number + 4, np.uint8) for number in numbers])


def frame_numbers(path: Path) -> list[int]:
    with av.open(str(path)) as container:
        pictures = [
            (frame.to_ndarray(format="rgb24").mean(), frame.time)
            for frame in container.decode(video=0)
        ]
    times_s = [time_s for _, time_s in pictures]
    assert times_s == pytest.approx([index / FPS for index in range(len(times_s))], abs=1e-3)
    return [round((grey - 4) / 4) for grey, _ in pictures]


def log_of(path: Path) -> Path:
    """Elsewhere, so that what is left beside the video can be told by its names alone."""
    return path.parent.with_name(f"{path.parent.name}.{path.name}.log")


class LoggedWriter(VideoWriter):
    """A writer whose ledger is a stream's log, which outlives it; a new one continues there."""

    def __init__(self, path: Path, *, resume: bool = True, **changes: Any) -> None:
        history = read_history(log_of(path)) if resume else StreamHistory()
        if history.is_published:
            history = StreamHistory()
        self.log = StreamLog(log_of(path), resume=bool(history.openings))
        if not history.openings:
            self.log.append(opened())
        size: dict[str, Any] = {"width": SIDE, "height": SIDE, "fps": FPS}
        try:
            super().__init__(path, ledger=self.log, earlier=history.video, **(size | changes))
        except UserInputError:
            self.log.close()
            raise

    def _end(self, *, keep: bool, patience_s: float | None = None) -> None:
        super()._end(keep=keep, patience_s=patience_s)
        self.log.close()


def writer_for(path: Path, *, resume: bool = True, keep_on_error: bool = False) -> LoggedWriter:
    return LoggedWriter(path, resume=resume, keep_on_error=keep_on_error)


def write_chunks(writer: VideoWriter, stop: int, *, start: int | None = None) -> None:
    for index in range(writer.earlier_chunks if start is None else start, stop):
        writer.write(greys(index))


def suspended(path: Path, num_chunks: int, *, first: int | None = None) -> None:
    writer = writer_for(path)
    write_chunks(writer, num_chunks if first is None else first + num_chunks, start=first)
    writer.suspend()
    writer.suspend()


def finish(path: Path) -> list[int]:
    """Resume, write the chunks that are missing and return the numbers of all frames."""
    with writer_for(path) as writer:
        write_chunks(writer, len(CHUNK_SIZES))
    assert read_history(log_of(path)).is_published
    assert list(path.parent.iterdir()) == [path]
    return frame_numbers(path)


def run_until_killed(script: str, path: Path) -> None:
    command = [sys.executable, "-c", WRITE_CHUNKS + textwrap.dedent(script), str(path)]
    root = Path(__file__).parents[2]
    killed = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr


@SUFFIXES
@pytest.mark.parametrize(
    ("point", "num_whole"),
    [("first frame", 0), ("mid-chunk", 2), ("between packets and record", 2), ("after chunk", 3)],
)
def test_a_killed_writer_loses_no_whole_chunk(
    tmp_path: Path, suffix: str, point: str, num_whole: int
) -> None:
    path = tmp_path / f"video{suffix}"
    script = """
        writer = LoggedWriter(Path(sys.argv[1]))
        encode, commit = SegmentEncoder.encode, VideoSegments.commit_chunk
        calls = {"first frame": (0, 9), "mid-chunk": (17, 9),
                 "between packets and record": (99, 2), "after chunk": (99, 9)}[POINT]
        counts = [0, 0]
        def reach(which):
            counts[which] += 1
            if counts[which] > calls[which]:
                die()
        SegmentEncoder.encode = lambda self, frame: (reach(0), encode(self, frame))
        VideoSegments.commit_chunk = lambda self, *a, **o: (reach(1), commit(self, *a, **o))
        for first, count in ((0, 5), (5, 8), (13, 8)):
            writer.write(greys(first, count))
        writer.drain()
        die()
    """
    run_until_killed(script.replace("POINT", repr(point)), path)
    assert not path.exists()
    with writer_for(path) as writer:
        assert writer.earlier_chunks == writer.durable_chunks == num_whole
        assert writer.earlier_frames == STARTS[num_whole]
        write_chunks(writer, len(CHUNK_SIZES))
    assert frame_numbers(path) == list(range(STARTS[-1]))
    assert list(tmp_path.iterdir()) == [path]


def test_many_lives_make_one_video(tmp_path: Path) -> None:
    path = tmp_path / "video.mp4"
    for num_chunks in (2, 2, 3, 6):
        suspended(path, num_chunks)
        assert not path.exists()
    assert finish(path) == list(range(STARTS[-1]))


def test_a_kill_from_outside_at_any_time_keeps_what_was_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "video.mp4"
    script = """
        writer = LoggedWriter(Path(sys.argv[1]), resume=False)
        for index in range(100_000):
            writer.write(greys(index % 60, 1))
            print(writer.durable_chunks, flush=True)
    """
    command = [sys.executable, "-c", WRITE_CHUNKS + textwrap.dedent(script), str(path)]
    acknowledged = 0
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            acknowledged = int(line)
            if acknowledged >= 100:
                process.kill()
                break
    with writer_for(path) as writer:
        held = writer.earlier_frames
    assert held >= acknowledged
    assert frame_numbers(path) == [index % 60 for index in range(held)]


@SUFFIXES
def test_a_chunk_is_durable_without_the_next_one(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"video{suffix}"
    writer = writer_for(path)
    for index in range(3):
        writer.write(greys(index))
        writer.drain()
        assert writer.durable_chunks == index + 1
    copy = tmp_path / "copy"
    copy.mkdir()
    for hidden in tmp_path.glob(f".video{suffix}.*"):
        (copy / hidden.name).write_bytes(hidden.read_bytes())
    history = read_history(log_of(path))
    writer.abort()
    copied = copy / path.name
    with VideoWriter(copied, width=SIDE, height=SIDE, fps=FPS, earlier=history.video) as resumed:
        assert resumed.earlier_chunks == 3
    assert frame_numbers(copy / path.name) == list(range(STARTS[3]))


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


def test_a_new_recording_removes_what_a_dead_writer_left(tmp_path: Path) -> None:
    path = tmp_path / "video.mp4"
    suspended(path, 3)
    suspended(path, 5)
    (tmp_path / ".video.mp4.partial.mp4").write_bytes(b"half a join")
    suspended(tmp_path / "other.mp4", 1)
    with writer_for(path, resume=False) as writer:
        assert writer.earlier_chunks == 0
        write_chunks(writer, 1)
    assert frame_numbers(path) == list(range(STARTS[1]))
    assert finish_other(tmp_path) == [0, 1, 2, 3, 4]


def finish_other(folder: Path) -> list[int]:
    writer_for(folder / "other.mp4").close()
    return frame_numbers(folder / "other.mp4")


def test_the_check_leaves_a_recording_to_be_resumed(tmp_path: Path) -> None:
    path = tmp_path / "video.mp4"
    suspended(path, 3)
    check_recordable(path, width=SIDE, height=SIDE, fps=FPS)
    assert finish(path) == list(range(STARTS[-1]))


def test_abort_of_a_resumed_recording_leaves_nothing(tmp_path: Path) -> None:
    suspended(tmp_path / "video.mp4", 3)
    writer = writer_for(tmp_path / "video.mp4")
    write_chunks(writer, 5)
    writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_a_suspended_recording_of_no_chunk_leaves_nothing(tmp_path: Path) -> None:
    suspended(tmp_path / "video.mp4", 0)
    assert list(tmp_path.iterdir()) == []


def test_closing_a_resumed_recording_publishes_it_without_a_new_chunk(tmp_path: Path) -> None:
    path = tmp_path / "video.mp4"
    suspended(path, 3)
    writer_for(path).close()
    assert frame_numbers(path) == list(range(STARTS[3]))


@pytest.mark.parametrize("point", ["VideoSegments.remove", "LoggedWriter._end", "Path.replace"])
def test_a_join_that_was_killed_before_its_cleanup_can_be_repeated(
    tmp_path: Path, point: str
) -> None:
    path = tmp_path / "video.mp4"
    script = """
        whole = POINT
        POINT = lambda *args, **options: (whole(*args, **options), die())
        with LoggedWriter(Path(sys.argv[1])) as writer:
            writer.write(greys(0, 5))
    """
    run_until_killed(script.replace("POINT", point), path)
    assert frame_numbers(path) == [0, 1, 2, 3, 4]
    assert read_history(log_of(path)).is_published == (point != "Path.replace")
    assert finish(path) == list(range(STARTS[-1]))


def test_an_exception_keeps_the_chunks_where_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "video.mp4"
    with pytest.raises(KeyboardInterrupt), writer_for(path, keep_on_error=True) as writer:
        write_chunks(writer, 3)
        raise KeyboardInterrupt
    with writer_for(path) as writer:
        assert writer.earlier_chunks == 3


def test_an_exit_without_close_keeps_the_chunks_where_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "video.mp4"
    script = """
        path = Path(sys.argv[1])
        writer = LoggedWriter(path, resume=False, keep_on_error=True)
        writer.write(greys(0, 5))
    """
    command = [sys.executable, "-c", WRITE_CHUNKS + textwrap.dedent(script), str(path)]
    subprocess.run(command, cwd=Path(__file__).parents[2], timeout=60, check=True)
    with writer_for(path) as writer:
        assert writer.earlier_chunks == 1


@pytest.mark.parametrize(
    ("size", "fps"), [((SIDE, SIDE), 24), ((SIDE, 2 * SIDE), FPS)], ids=["rate", "size"]
)
def test_another_format_cannot_resume_and_harms_nothing(
    tmp_path: Path, size: tuple[int, int], fps: int
) -> None:
    path = tmp_path / "video.mp4"
    suspended(path, 3)
    with pytest.raises(UserInputError, match="to resume is"):
        LoggedWriter(path, width=size[0], height=size[1], fps=fps)
    assert finish(path) == list(range(STARTS[-1]))


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


def test_durable_chunks_lags_behind_an_encoder_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    encode = SegmentEncoder.encode

    def gated(encoder: SegmentEncoder, frame_HWC: NDArray[np.uint8]) -> None:
        assert gate.wait(timeout=30)
        encode(encoder, frame_HWC)

    monkeypatch.setattr(SegmentEncoder, "encode", gated)
    writer = writer_for(tmp_path / "video.mp4")
    write_chunks(writer, 2)
    assert writer.durable_chunks == 0
    gate.set()
    writer.close()
    assert writer.durable_chunks == 2


def test_recording_errors_are_not_hidden_by_a_second_use(tmp_path: Path) -> None:
    writer = writer_for(tmp_path / "video.mp4")
    writer.abort()
    with pytest.raises(RecordingError, match="has ended"):
        writer.write(greys(0))


def test_a_bit_that_flips_before_the_join_is_named_and_not_published(tmp_path: Path) -> None:
    path = tmp_path / "video.mp4"
    writer = writer_for(path)
    write_chunks(writer, 3)
    writer.drain()
    flip_a_bit(tmp_path)
    with pytest.raises(RecordingError, match=r"of chunk 0 are others\); make it anew"):
        writer.close()
    assert not path.exists()
    assert not read_history(log_of(path)).is_published


def test_chunks_that_a_resume_makes_again_are_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "video.mp4"
    suspended(path, 5)
    log = StreamLog(log_of(path), resume=True)
    log.append(opened(resumed_at_chunk=2))
    log.close()
    with writer_for(path) as writer:
        assert writer.earlier_chunks == 2
    assert frame_numbers(path) == list(range(STARTS[2]))
