import gc
import os
import shutil
import sys
import textwrap
import threading
import time
from concurrent.futures import Future
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from scope_contracts.errors import UserInputError
from scope_rt.disk import DaemonExecutor, answer
from scope_rt.video import writer as video_writer
from scope_rt.video.encoder import SegmentEncoder
from scope_rt.video.picture_format import check_recordable
from scope_rt.video.segments import MemoryLedger
from scope_rt.video.writer import VideoWriter
from tests import warm_python

SIDE = 64
NAVY = (10, 14, 60)
SQUARE = (230, 60, 40)


def moving_square(num_frames: int, *, first: int = 0) -> NDArray[np.uint8]:
    frames_THWC = np.full((num_frames, SIDE, SIDE, 3), NAVY, dtype=np.uint8)
    for index in range(num_frames):
        left = (first + index) * 16 % SIDE
        frames_THWC[index, 20:36, left : left + 16] = SQUARE
    return frames_THWC


def decode(path: Path) -> tuple[NDArray[np.uint8], list[float | None]]:
    """The frames THWC and their times in seconds."""
    with av.open(str(path)) as container:
        frames = list(container.decode(video=0))
    pixels_THWC = np.stack([frame.to_ndarray(format="rgb24") for frame in frames])
    return pixels_THWC.astype(np.uint8), [frame.time for frame in frames]


def writer_for(path: Path, *, scale: int | None = None, max_queued_chunks: int = 8) -> VideoWriter:
    return VideoWriter(
        path,
        width=SIDE,
        height=SIDE,
        fps=16,
        scale=scale,
        max_queued_chunks=max_queued_chunks,
    )


@pytest.mark.parametrize("suffix", [".mp4", ".webm"])
def test_every_frame_is_written_once_in_order_and_in_colour(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"video{suffix}"
    with writer_for(path) as writer:
        for chunk in range(4):
            writer.write(moving_square(12, first=12 * chunk))
    decoded_THWC, times_s = decode(path)
    wanted_THWC = np.stack(
        [frame.repeat(4, axis=0).repeat(4, axis=1) for frame in moving_square(48)]
    )
    assert decoded_THWC.shape == wanted_THWC.shape == (48, 256, 256, 3)
    # WebM counts in milliseconds.
    assert times_s == pytest.approx([index / 16 for index in range(48)], abs=1e-3)
    assert writer.num_frames == 48
    assert len(writer.encode_ms) == 4
    # A frame out of its place would differ by about 12 on average.
    error = np.abs(decoded_THWC.astype(float) - wanted_THWC).mean(axis=(1, 2, 3))
    assert error.max() < 3


def test_fractional_rate_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "video.mp4"
    rate = Fraction(30000, 1001)
    with VideoWriter(path, width=SIDE, height=SIDE, fps=rate) as writer:
        writer.write(moving_square(12))
    assert decode(path)[1] == pytest.approx([index / rate for index in range(12)], abs=1e-6)


def test_scale_one_keeps_the_size(tmp_path: Path) -> None:
    with writer_for(tmp_path / "video.mp4", scale=1) as writer:
        writer.write(moving_square(2))
    assert decode(tmp_path / "video.mp4")[0].shape == (2, SIDE, SIDE, 3)


def test_frames_are_encoded_where_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of 12 pictures of 480x832 takes longer than all else that `write` does."""
    chunks_THWC = [moving_square(2, first=2 * chunk) for chunk in range(3)]
    seen_HWC = list[NDArray[np.uint8]]()
    encode = SegmentEncoder.encode

    def watched(encoder: SegmentEncoder, frame_HWC: NDArray[np.uint8]) -> None:
        seen_HWC.append(frame_HWC)
        encode(encoder, frame_HWC)

    monkeypatch.setattr(SegmentEncoder, "encode", watched)
    with writer_for(tmp_path / "video.mp4") as writer:
        for frames_THWC in chunks_THWC:
            writer.write(frames_THWC)
    frames_HWC = [frame_HWC for frames_THWC in chunks_THWC for frame_HWC in frames_THWC]
    for seen, frame in zip(seen_HWC, frames_HWC, strict=True):
        assert np.shares_memory(seen, frame)


def test_the_final_name_appears_only_at_close(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "video.mp4"
    writer = writer_for(path)
    writer.write(moving_square(12))
    assert not path.exists()
    writer.close()
    writer.close()
    assert list(path.parent.iterdir()) == [path]


def test_abort_leaves_nothing_and_keeps_an_earlier_video(tmp_path: Path) -> None:
    path = tmp_path / "video.mp4"
    path.write_bytes(b"an earlier run")
    writer = writer_for(path)
    writer.write(moving_square(12))
    writer.abort()
    writer.close()
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"an earlier run"


def test_abort_does_not_mind_a_folder_that_somebody_removed(tmp_path: Path) -> None:
    writer = writer_for(tmp_path / "folder" / "video.mp4")
    writer.write(moving_square(12))
    shutil.rmtree(tmp_path / "folder")
    writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_an_exception_in_the_stream_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), writer_for(tmp_path / "video.mp4") as writer:
        writer.write(moving_square(12))
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_video_of_no_frames_leaves_no_file(tmp_path: Path) -> None:
    with writer_for(tmp_path / "video.mp4"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_dies_of_an_exception_leaves_nothing(tmp_path: Path) -> None:
    script = """
        import sys, numpy as np
        from pathlib import Path
        from scope_rt.video.writer import VideoWriter
        writer = VideoWriter(Path(sys.argv[1]), width=64, height=64, fps=16)
        writer.write(np.zeros((12, 64, 64, 3), np.uint8))
        raise MemoryError("not handled")
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "video.mp4")]
    finished = warm_python.run(command, timeout=60)
    assert finished.stderr.rstrip().endswith("MemoryError: not handled")
    assert list(tmp_path.iterdir()) == []


def wait_for_no_thread_of_a_writer() -> None:
    deadline_s = time.monotonic() + 20
    while threads := [each for each in threading.enumerate() if each.name == "video-writer"]:
        assert time.monotonic() < deadline_s
        gc.collect()  # again and again: a thread that just ends a call still holds its writer
        threads[0].join(timeout=0.05)


def num_open_files(folder: Path) -> int:
    """How many file descriptors of this process stand for a file in `folder`."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum(os.readlink(link).startswith(str(folder)) for link in links)


@pytest.mark.parametrize("num_chunks", [0, 1])
def test_a_writer_that_nobody_holds_any_more_lets_go(tmp_path: Path, num_chunks: int) -> None:
    path, ledger = tmp_path / "video.mp4", MemoryLedger()
    writer = VideoWriter(path, width=SIDE, height=SIDE, fps=16, ledger=ledger, keep_on_error=True)
    for _ in range(num_chunks):
        writer.write(moving_square(2))
        writer.drain()
    assert num_open_files(tmp_path) == 2
    del writer
    wait_for_no_thread_of_a_writer()
    assert num_open_files(tmp_path) == 0
    with VideoWriter(path, width=SIDE, height=SIDE, fps=16, earlier=ledger.records) as resumed:
        assert resumed.earlier_chunks == num_chunks


def test_a_writer_that_nobody_holds_any_more_ends_the_chunk_it_is_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, gate, ledger = tmp_path / "video.mp4", threading.Event(), MemoryLedger()
    encode = VideoWriter._encode

    def gated(writer: VideoWriter, *chunk: Any) -> None:
        assert gate.wait(timeout=20)
        encode(writer, *chunk)

    monkeypatch.setattr(VideoWriter, "_encode", gated)
    writer = VideoWriter(path, width=SIDE, height=SIDE, fps=16, ledger=ledger, keep_on_error=True)
    writer.write(moving_square(2))
    del writer
    gate.set()
    wait_for_no_thread_of_a_writer()
    with VideoWriter(path, width=SIDE, height=SIDE, fps=16, earlier=ledger.records) as resumed:
        assert resumed.earlier_chunks == 1


def test_a_writer_whose_chunk_failed_unseen_lets_go_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def fail(writer: VideoWriter, *chunk: Any) -> None:
        failed.set()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(VideoWriter, "_encode", fail)
    writer = writer_for(tmp_path / "video.mp4")
    writer.write(moving_square(2))
    assert failed.wait(timeout=20)
    writer._thread.settle(timeout_s=20)
    del writer
    wait_for_no_thread_of_a_writer()
    writer_for(tmp_path / "video.mp4").abort()


@pytest.mark.parametrize(("keep", "want"), [(False, 1), (True, 3)])
def test_an_exit_encodes_what_is_queued_only_to_keep_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: bool, want: int
) -> None:
    begun, gate, encoded = threading.Event(), threading.Event(), []

    def gated(writer: VideoWriter, frames_THWC: NDArray[np.uint8], *others: Any) -> None:
        begun.set()
        assert gate.wait(timeout=20)
        encoded.append(len(frames_THWC))

    monkeypatch.setattr(VideoWriter, "_encode", gated)
    writer = VideoWriter(
        tmp_path / "video.mp4", width=SIDE, height=SIDE, fps=16, keep_on_error=keep
    )
    for _ in range(3):
        writer.write(moving_square(2))
    assert begun.wait(timeout=20)
    settle = DaemonExecutor.settle

    def settle_with_open_gate(thread: DaemonExecutor, *, timeout_s: float) -> None:
        gate.set()
        settle(thread, timeout_s=timeout_s)

    monkeypatch.setattr(DaemonExecutor, "settle", settle_with_open_gate)
    writer._at_exit()  # as the interpreter does
    assert len(encoded) == want


def test_a_full_queue_waits_and_says_for_how_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    encode = VideoWriter._encode

    def gated(writer: VideoWriter, *chunk: Any) -> None:
        assert gate.wait(timeout=30)
        encode(writer, *chunk)

    def answer_late(future: "Future[None]", **options: Any) -> Any:
        threading.Timer(0.2, gate.set).start()
        return answer(future, **options)

    monkeypatch.setattr(VideoWriter, "_encode", gated)
    monkeypatch.setattr(video_writer, "answer", answer_late)
    with writer_for(tmp_path / "video.mp4", max_queued_chunks=2) as writer:
        writer.write(moving_square(2))
        writer.write(moving_square(2))
        assert writer.blocked_s == 0
        writer.write(moving_square(2))
        assert writer.blocked_s > 0.05
    assert len(decode(tmp_path / "video.mp4")[0]) == 6


@pytest.mark.parametrize(
    ("name", "told"),
    [("video.gif", "want one of .mp4, .webm"), ("video", "suffix ''"), ("folder.mp4", "a folder")],
)
def test_an_unusable_name_is_refused_before_generation(
    tmp_path: Path, name: str, told: str
) -> None:
    (tmp_path / "folder.mp4").mkdir()
    with pytest.raises(UserInputError, match=told):
        writer_for(tmp_path / name)
    assert list(tmp_path.iterdir()) == [tmp_path / "folder.mp4"]


def test_a_folder_that_is_a_file_is_refused_before_generation(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("not a folder")
    with pytest.raises(UserInputError, match="choose a folder you may write to"):
        writer_for(tmp_path / "taken" / "video.mp4")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_refused_before_generation(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserInputError, match="choose a folder you may write to"):
        writer_for(tmp_path / "video.mp4")


def test_an_odd_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="width: got 63 pixels times scale 1"):
        VideoWriter(tmp_path / "video.mp4", width=63, height=64, fps=16, scale=1)
    assert list(tmp_path.iterdir()) == []


def test_frames_of_another_shape_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="want uint8"),
        writer_for(tmp_path / "video.mp4") as writer,
    ):
        writer.write(moving_square(2)[:, :32])
    assert list(tmp_path.iterdir()) == []


def test_an_empty_chunk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="T > 0"), writer_for(tmp_path / "video.mp4") as writer:
        writer.write(moving_square(0))


def test_two_living_writers_of_one_video_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "video.mp4"
    with writer_for(path) as writer:
        writer.write(moving_square(2))
        with pytest.raises(UserInputError, match="another process is writing it"):
            writer_for(path)
        with pytest.raises(UserInputError, match="another process is writing it"):
            check_recordable(path, width=SIDE, height=SIDE, fps=16)
        with writer_for(tmp_path / "other.mp4") as other:
            other.write(moving_square(2))
    assert len(decode(path)[0]) == 2


@pytest.mark.parametrize("name", ["video.gif", "folder.mp4"])
def test_the_check_refuses_what_a_writer_refuses(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.mp4").mkdir()
    with pytest.raises(UserInputError, match="output"):
        check_recordable(tmp_path / name, width=SIDE, height=SIDE, fps=16)
    with pytest.raises(UserInputError, match="width"):
        check_recordable(tmp_path / "video.mp4", width=63, height=SIDE, fps=16, scale=1)


def test_the_check_leaves_nothing(tmp_path: Path) -> None:
    check_recordable(tmp_path / "video.mp4", width=SIDE, height=SIDE, fps=16)
    assert list(tmp_path.iterdir()) == []
