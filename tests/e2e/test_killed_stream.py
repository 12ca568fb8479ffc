"""A stream killed at any change of its disk, and resumed, is the video that nothing happened to."""

from pathlib import Path

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from scope_contracts.log_records import Begun
from scope_lab.sample_log import opened
from scope_rt.control.resume_point import ResumePoint
from scope_rt.control.saved_points import SavedResumePoints
from scope_rt.record.progress import StreamProgress
from scope_rt.record.reader import read_progress, video_records
from scope_rt.record.snapshot import SnapshotStore
from scope_rt.record.stream_log import StreamLog
from scope_rt.video.writer import VideoWriter
from tests.control.memory_mesh import MemoryMesh, loop_over
from tests.record.killed import Report, lives

NUM_CHUNKS = 4
SIDE = 16
APART = 12.0
"""Of 255: neighbouring latents' colours differ by more."""


def stream(folder: Path, report: Report) -> None:
    """Make a video as `scope-rt stream` does, or resume the one that is there."""
    video, path, store = folder / "a.mp4", folder / "a.scope", SnapshotStore(folder / "snapshot")
    loaded, progress = store.load(ResumePoint), read_progress(path)
    if progress.is_published:
        VideoWriter(video, width=1, height=1, scale=SIDE, fps=16).abort()  # what is left beside it
        store.clear()
        path.unlink()
        return
    if loaded is None:
        progress = StreamProgress()
    header, point = loaded or (None, None)
    log = StreamLog(path, resume=header is not None, at_least=header.log_offset if header else 0)
    log.append(opened(resumed_at_chunk=header.next_chunk_index if header else -1))
    if header is None:
        log.append(Begun(at_s=0.0, prompt="p"))
    writer = VideoWriter(
        video,
        width=1,
        height=1,
        scale=SIDE,
        fps=16,
        ledger=log,
        earlier=video_records(path, progress),
    )
    loop = loop_over(
        MemoryMesh(),
        max_in_flight=2,
        log=log,
        resume_points=SavedResumePoints(store=store, log=path, run_id="", identity=()),
        resumed=point,
    )
    for chunk in loop.run(NUM_CHUNKS, acknowledged=lambda: writer.durable_chunks):
        writer.write(chunk.frames, chunk_index=chunk.chunk_index)
        if chunk.chunk_index % 2:
            writer.drain()  # so that some chunks are acknowledged and some are pending
        report(str(chunk.chunk_index))
    writer.close()
    assert log.failure is None
    store.clear()
    log.remove()


def colours(video: Path) -> NDArray[np.float64]:
    """The mean colour of every frame, `[T, 3]`."""
    with av.open(str(video)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    means: NDArray[np.float64] = np.stack(frames).mean(axis=(1, 2))
    return means


@pytest.mark.timeout(240)
@pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.lab)])
def test_a_stream_killed_anywhere_and_resumed_loses_repeats_and_damages_no_chunk(
    tmp_path: Path, step: int
) -> None:
    (tmp_path / "whole").mkdir()
    stream(tmp_path / "whole", lambda word: None)
    want = colours(tmp_path / "whole" / "a.mp4")
    assert np.abs(np.diff(want[::4], axis=0)).max(axis=1).min() > APART, "frames can be told apart"
    num_resumed = 0
    for life, _ in lives(stream, tmp_path / "lives", step=step):
        if not (life / "a.mp4").exists() or (life / "a.scope").exists():
            num_resumed += SnapshotStore(life / "snapshot").header() is not None
            stream(life, lambda word: None)
        got = colours(life / "a.mp4")
        assert got.shape == want.shape
        off = float(np.abs(got - want).max())  # another key frame rounds otherwise
        assert off < APART, f"killed at half-change {life.name}: a colour is off by {off:.1f}"
        assert [path.name for path in life.iterdir()] == ["a.mp4"]
    assert num_resumed > 60 / step
