import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from scope_contracts.errors import RecordingError, UserInputError
from scope_rt.video.encoder import SegmentEncoder
from scope_rt.video.segments import MemoryLedger
from scope_rt.video.writer import VideoWriter

SIDE = 64
CHUNK = 4
SUFFIXES = pytest.mark.parametrize("suffix", [".mp4", ".webm"])


def noise(num_frames: int = CHUNK) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (num_frames, SIDE, SIDE, 3), dtype=np.uint8)


LEDGERS = dict[Path, MemoryLedger]()


def writer_for(path: Path, *, resume: bool = False, stall_timeout_s: float = 60.0) -> VideoWriter:
    """A new writer, or with `resume` one that continues what the one before has of `path`."""
    earlier = LEDGERS[path].records if resume else []
    ledger = LEDGERS[path] = MemoryLedger()
    ledger.records.extend(earlier)
    return VideoWriter(
        path,
        width=SIDE,
        height=SIDE,
        fps=16,
        ledger=ledger,
        earlier=earlier,
        stall_timeout_s=stall_timeout_s,
    )


def num_frames_in(path: Path) -> int:
    with av.open(str(path)) as container:
        return sum(1 for _ in container.decode(video=0))


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Writing more than `num_bytes` to one file fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of 2 MB."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root may mount a small disk")
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False, timeout=30).returncode != 0:
        pytest.skip("this machine lets nobody mount a disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True, timeout=30)


def record_until_refused(writer: VideoWriter) -> None:
    for _ in range(100):
        writer.write(noise())
    writer.close()


@SUFFIXES
def test_a_full_disk_is_one_named_error_and_keeps_the_whole_chunks(
    small_disk: Path, suffix: str
) -> None:
    path = small_disk / f"video{suffix}"
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(1_500_000))
    writer = writer_for(path)
    with pytest.raises(RecordingError, match=r"No space left on device.*free disk space") as error:
        record_until_refused(writer)
    assert "\n" not in str(error.value)
    whole = writer.durable_chunks
    assert whole > 0
    assert f"first {whole} chunks are kept" in str(error.value)
    ballast.unlink()
    with pytest.raises(RecordingError, match="has ended"):
        writer.write(noise())
    with writer_for(path, resume=True) as resumed:
        assert resumed.earlier_chunks == whole
    assert num_frames_in(path) == CHUNK * whole
    assert list(small_disk.iterdir()) == [path]


def test_a_disk_without_room_for_the_join_keeps_the_chunks(small_disk: Path) -> None:
    path = small_disk / "video.mp4"
    writer = writer_for(path)
    while sum(file.stat().st_size for file in small_disk.iterdir()) < 1_200_000:
        writer.write(noise())
        writer.drain()
    whole = writer.durable_chunks
    with pytest.raises(RecordingError, match=f"first {whole} chunks are kept"):
        writer.close()
    assert not path.exists()
    assert not list(small_disk.glob(".video.mp4.*partial.mp4"))
    with writer_for(path, resume=True) as resumed:
        assert resumed.earlier_chunks == whole
        resumed.suspend()


@SUFFIXES
def test_a_file_that_may_not_grow_keeps_the_whole_chunks(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"video{suffix}"
    writer = writer_for(path)
    with largest_file(300_000), pytest.raises(RecordingError, match="free disk space"):
        record_until_refused(writer)
    with writer_for(path, resume=True) as resumed:
        assert resumed.earlier_chunks == writer.durable_chunks
        resumed.write(noise())
    assert num_frames_in(path) == CHUNK * (writer.durable_chunks + 1)


@SUFFIXES
def test_a_disk_that_is_full_from_the_first_chunk_leaves_nothing(
    tmp_path: Path, suffix: str
) -> None:
    writer = writer_for(tmp_path / f"video{suffix}")
    with largest_file(400), pytest.raises(RecordingError, match="no chunk of it is whole"):
        record_until_refused(writer)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_before_the_start_is_refused_before_generation(tmp_path: Path) -> None:
    with largest_file(10), pytest.raises(UserInputError, match="free disk space"):
        writer_for(tmp_path / "video.mp4")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_still_full_at_a_resume_keeps_the_chunks_for_another(tmp_path: Path) -> None:
    path = tmp_path / "video.mp4"
    writer = writer_for(path)
    writer.write(noise())
    writer.drain()
    writer.suspend()
    with largest_file(10), pytest.raises(RecordingError, match="free disk space, then resume"):
        writer_for(path, resume=True)
    with writer_for(path, resume=True) as resumed:
        assert resumed.earlier_chunks == 1
    assert num_frames_in(path) == CHUNK


def test_no_chunk_is_kept_behind_one_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full for a moment only must not leave a hole."""
    path = tmp_path / "video.mp4"
    encode = SegmentEncoder.encode
    calls = 0

    def full_once(encoder: SegmentEncoder, frame_HWC: NDArray[np.uint8]) -> None:
        nonlocal calls
        calls += 1
        if calls == 2 * CHUNK + 2:
            raise OSError(28, "No space left on device")
        encode(encoder, frame_HWC)

    monkeypatch.setattr(SegmentEncoder, "encode", full_once)
    writer = writer_for(path)
    with pytest.raises(RecordingError, match="first 2 chunks are kept"):
        for _ in range(5):
            writer.write(noise())
        writer.close()
    with writer_for(path, resume=True):
        pass
    assert num_frames_in(path) == 2 * CHUNK
