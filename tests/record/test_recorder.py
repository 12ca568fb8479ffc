"""Whatever happens to its file, the recorder keeps whole records and never raises into the loop."""

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scope_contracts.errors import PeerLostError, UserInputError
from scope_contracts.log_file import LogReader
from scope_contracts.log_records import (
    Closed,
    Control,
    Dropped,
    Failed,
    Finished,
    Opened,
    Planned,
    Record,
)
from scope_contracts.tensor_spec import DType
from scope_rt.control.chunk import Chunk
from scope_rt.control.inbox import Conditioning, Directive
from scope_rt.control.transition import Interpolation, TransitionSpec
from scope_rt.faults import FaultPoint
from scope_rt.record.recorder import Recorder
from tests.stream_logs import opened, planned, story, write

ENVELOPE = planned(0).envelope


def chunk(index: int = 0, dtype: torch.dtype = torch.float32) -> Chunk:
    latents = torch.arange(24.0).reshape(3, 2, 2, 2).to(dtype)
    raw = latents.view(torch.uint8).numpy().tobytes()
    return Chunk(
        chunk_index=index,
        cache_epoch=0,
        prompt="a red circle",
        frames=np.zeros((12, 4, 4, 3), np.uint8),
        latents=latents,
        latents_sha256=hashlib.sha256(raw).hexdigest(),
        generator_calls=3,
        recomputed=False,
        kv_cache_attention_bias=1.0,
        stage_ms={"plan": 0.5, "generate": 40.0},
    )


def read(path: Path) -> tuple[list[Record], list[bytes], int]:
    with path.open("rb") as file:
        reader = LogReader(file)
        entries = list(reader)
        blobs = [reader.blob(entry) for entry in entries]
        return [entry.record for entry in entries], blobs, reader.torn_bytes


class FailAt:
    """A disk that is full at the n-th record; `half` of that record may still fit."""

    def __init__(self, number: int) -> None:
        self.left = number

    def reach(self, point: FaultPoint, chunk: int, value: Any) -> Any:
        assert point is FaultPoint.RECORD
        self.left -= 1
        if self.left == 0:
            raise OSError(28, "No space left on device")
        return value


def tell(path: Path) -> Recorder:
    recorder = Recorder(path, opened())
    recorder.planned(ENVELOPE)
    recorder.finished(chunk())
    return recorder


def run(path: Path, program: str) -> int:
    """The exit code of a process that has told of one chunk and then runs `program`."""
    begin = f"""
import os, resource, signal
from pathlib import Path
from tests.record.test_recorder import tell
path = Path({str(path)!r})
tell(path)
"""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", begin + program]
    return subprocess.run(command, cwd=root, timeout=60, check=False).returncode


def test_what_happened_is_told_in_its_order_with_its_time(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.scope"
    recorder = tell(path)
    recorder.dropped(ENVELOPE)
    recorder.close()
    recorder.close()
    records, blobs, torn_bytes = read(path)
    kinds = [Opened, Planned, Finished, Dropped, Closed]
    assert [type(record) for record in records] == kinds
    assert torn_bytes == 0
    times = [record.at_s for record in records]
    assert times == sorted(times)
    assert times[0] > 1e9
    assert isinstance(records[1], Planned)
    assert records[1].envelope == ENVELOPE
    assert isinstance(records[2], Finished)
    assert records[2].num_frames == 12
    assert records[2].stage_ms == (("plan", 0.5), ("generate", 40.0))
    assert hashlib.sha256(blobs[2]).hexdigest() == records[2].latents_sha256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latents_are_kept_bit_for_bit_in_their_own_dtype(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    recorder = Recorder(tmp_path / "a.scope", opened())
    recorder.finished(chunk(dtype=dtype))
    recorder.close()
    records, blobs, _ = read(tmp_path / "a.scope")
    assert isinstance(records[1], Finished)
    assert records[1].latents is not None
    assert records[1].latents.dtype == DType(str(dtype).removeprefix("torch."))
    latents = torch.frombuffer(bytearray(blobs[1]), dtype=dtype).reshape(records[1].latents.shape)
    assert torch.equal(latents, chunk(dtype=dtype).latents)


def test_control_input_is_kept_whole_and_its_absence_takes_no_space(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a.scope", opened())
    embeds = torch.ones(1, 2, 3)
    recorder.control(0, Directive())
    recorder.control(
        4,
        Directive(
            conditioning=Conditioning("a green square", embeds),
            transition=TransitionSpec(num_chunks=5, method=Interpolation.SLERP, bias_floor=0.25),
        ),
    )
    recorder.control(9, Directive(hard_cut=True, drop_in_flight=True, recompute=True))
    recorder.close()
    _, prompt, cut, closed = read(tmp_path / "a.scope")[0]
    assert isinstance(closed, Closed)
    assert prompt == Control(
        at_s=prompt.at_s,
        chunk_index=4,
        prompt="a green square",
        embeds_sha256=hashlib.sha256(embeds.numpy().tobytes()).hexdigest(),
        transition_num_chunks=5,
        transition_method="slerp",
        transition_bias_floor=0.25,
    )
    assert cut == Control(
        at_s=cut.at_s, chunk_index=9, hard_cut=True, drop_in_flight=True, recompute=True
    )


def test_a_failed_stream_ends_with_its_error_and_not_as_closed(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a.scope", opened())
    recorder.planned(ENVELOPE)
    recorder.failed(PeerLostError("rank 1 \udcff " + "x" * 100_000))
    recorder.close()
    last = read(tmp_path / "a.scope")[0][-1]
    assert isinstance(last, Failed)
    assert last.chunk_index == 0
    assert last.error.startswith("PeerLostError: rank 1 ? xxx")


@pytest.mark.parametrize("number", [2, 3])
def test_a_full_disk_ends_the_recording_at_a_whole_record_and_not_the_stream(
    tmp_path: Path, number: int
) -> None:
    path = tmp_path / "a.scope"
    recorder = Recorder(path, opened(), faults=FailAt(number))
    recorder.planned(ENVELOPE)
    recorder.finished(chunk())
    recorder.failed(PeerLostError("later"))
    recorder.close()
    records, _, torn_bytes = read(path)
    assert (len(records), torn_bytes) == (number - 1, 0)
    assert recorder.failure is not None
    assert f"{path} ended after {path.stat().st_size} bytes" in recorder.failure
    assert "No space left on device" in recorder.failure


def test_a_record_that_fits_only_in_part_is_taken_back(tmp_path: Path) -> None:
    """A file size limit of the operating system stands for a disk that fills in mid-record."""
    path = tmp_path / "a.scope"
    limit = """
limit = path.stat().st_size - 100
os.truncate(path, 0)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
recorder = tell(path)
assert "File too large" in recorder.failure, recorder.failure
"""
    assert run(path, limit) == 0
    records, _, torn_bytes = read(path)
    assert [type(record) for record in records] == [Opened, Planned]
    assert torn_bytes == 0


def test_a_killed_process_leaves_every_record_it_was_told(tmp_path: Path) -> None:
    path = tmp_path / "a.scope"
    assert run(path, "os.kill(os.getpid(), signal.SIGKILL)") == -signal.SIGKILL
    records, _, torn_bytes = read(path)
    assert [type(record) for record in records] == [Opened, Planned, Finished]
    assert torn_bytes == 0


def test_a_resumed_stream_goes_on_in_the_same_file_after_what_is_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "a.scope", story()[:4])
    with path.open("ab") as file:
        file.write(b"\x10\x00")
    recorder = Recorder(path, opened(resumed_at_chunk=1), resume=True)
    recorder.finished(chunk(1))
    recorder.close()
    records, _, torn_bytes = read(path)
    assert records[:4] == [record for record, _ in story()[:4]]
    assert [type(record) for record in records[4:]] == [Opened, Finished, Closed]
    assert torn_bytes == 0
    Recorder(path, opened()).close()
    assert [type(record) for record in read(path)[0]] == [Opened, Closed]


def test_a_damaged_recording_is_left_alone_and_the_resumed_stream_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "a.scope"
    path.write_bytes(b"my holiday notes")
    recorder = Recorder(path, opened(resumed_at_chunk=1), resume=True)
    recorder.planned(ENVELOPE)
    recorder.close()
    assert path.read_bytes() == b"my holiday notes"
    assert recorder.failure is not None
    assert "is this a stream log" in recorder.failure


@pytest.mark.timeout(20)
@pytest.mark.parametrize("resume", [False, True])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, resume: bool) -> None:
    """Nobody reads it, so that opening it to write would never return."""
    path = tmp_path / "a.scope"
    os.mkfifo(path)
    if resume:
        failure = Recorder(path, opened(resumed_at_chunk=1), resume=True).failure
    else:
        with pytest.raises(UserInputError) as caught:
            Recorder(path, opened())
        failure = str(caught.value)
    assert failure is not None
    assert "not a regular file" in failure


def test_a_path_that_cannot_be_written_is_said_before_the_stream_starts(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "a.scope" / "b.scope"):
        (tmp_path / "a.scope").write_bytes(b"")
        with pytest.raises(UserInputError, match="choose another file"):
            Recorder(path, opened())
