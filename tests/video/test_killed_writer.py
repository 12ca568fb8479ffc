"""However a process that writes a video dies, the chunks that were whole stay."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from scope_rt.record.reader import read_history
from tests import warm_python
from tests.video.grey_video import (
    CHUNK_SIZES,
    STARTS,
    SUFFIXES,
    finish,
    frame_numbers,
    log_of,
    write_chunks,
    writer_for,
)

ROOT = Path(__file__).parents[2]
WRITE_CHUNKS = """
import os, signal, sys
from pathlib import Path
from scope_rt.video.encoder import SegmentEncoder
from scope_rt.video.segments import VideoSegments
from tests.video.grey_video import LoggedWriter, grey_frames as greys

def die(*args, **options):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def command_of(script: str, path: Path) -> list[str]:
    """A process that runs `script` after `WRITE_CHUNKS`, with `path` as its argument."""
    return [sys.executable, "-c", WRITE_CHUNKS + textwrap.dedent(script), str(path)]


def run_until_killed(script: str, path: Path) -> None:
    killed = warm_python.run(command_of(script, path), cwd=ROOT, timeout=60)
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
        write_chunks(writer, len(CHUNK_SIZES))
    assert frame_numbers(path) == list(range(STARTS[-1]))
    assert list(tmp_path.iterdir()) == [path]


def test_a_kill_from_outside_at_any_time_keeps_what_was_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "video.mp4"
    script = """
        writer = LoggedWriter(Path(sys.argv[1]), resume=False)
        for index in range(100_000):
            writer.write(greys(index % 60, 1))
            print(writer.durable_chunks, flush=True)
    """
    acknowledged = 0
    command = command_of(script, path)
    there, out = os.pipe()
    with warm_python.Process(command, cwd=ROOT, stdout=out) as process, os.fdopen(there) as lines:
        os.close(out)
        for line in lines:
            acknowledged = int(line)
            if acknowledged >= 100:
                process.kill()
                break
    with writer_for(path) as writer:
        held = writer.earlier_chunks  # of one frame each
    assert held >= acknowledged
    assert frame_numbers(path) == [index % 60 for index in range(held)]


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


def test_an_exit_without_close_keeps_the_chunks_where_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "video.mp4"
    script = """
        path = Path(sys.argv[1])
        writer = LoggedWriter(path, resume=False, keep_on_error=True)
        writer.write(greys(0, 5))
    """
    subprocess.run(command_of(script, path), cwd=ROOT, timeout=60, check=True)
    with writer_for(path) as writer:
        assert writer.earlier_chunks == 1
