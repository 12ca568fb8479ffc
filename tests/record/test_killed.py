"""A stream killed at any change of its disk is whole up to what was saved, and can be resumed."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from scope_contracts.log_file import LogReader
from scope_contracts.log_records import Closed, Finished, Published
from scope_lab.sample_log import durable, finished, opened, planned
from scope_rt.record.reader import open_log, read_history
from scope_rt.record.snapshot import SnapshotStore
from scope_rt.record.snapshot_header import SnapshotHeader
from scope_rt.record.stream_log import StreamLog
from tests.record.killed import Report, lives

NUM_CHUNKS = 5
NUM_PENDING = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    next_chunk_index: int
    text: Tensor
    pending: tuple[Tensor, ...]


def latents(index: int) -> Tensor:
    return torch.tensor([float(index), 1.0])


def stream(folder: Path, report: Report) -> None:
    """Log and save chunks as a stream does, and end it."""
    log = StreamLog(folder / "a.scope", record_latents=True)
    log.append(opened())
    store, text = SnapshotStore(folder / "snapshot"), torch.ones(3)
    pending: list[Tensor] = []
    for index in range(NUM_CHUNKS):
        log.append(planned(index))
        pending = [*pending[1 - NUM_PENDING :], latents(index)]
        state = State(next_chunk_index=index + 1, text=text, pending=tuple(pending))
        wait = store.begin(header(0, index + 1), state, log=log)
        log.append(*finished(index, values=latents(index).tolist()))
        wait()
        report(str(index + 1))
        log.append(durable(index))
    assert log.failure is None
    log.append(Published(at_s=0.0, num_bytes=0, digest=""))
    log.append(Closed(at_s=0.0))
    report("ended")
    store.clear()
    log.remove()
    log.close()


def header(log_offset: int, next_chunk_index: int) -> SnapshotHeader:
    return SnapshotHeader(
        run_id="run",
        identity=(("seed", "7"),),
        log="a.scope",
        log_offset=log_offset,
        next_chunk_index=next_chunk_index,
    )


def check_resumable(life: Path, num_saved: int) -> None:
    """What was reported as saved is there, bit for bit, in the snapshot and in the log."""
    loaded = SnapshotStore(life / "snapshot").load(State)
    if loaded is None:
        assert num_saved == 0
        return
    saved, state = loaded
    assert saved.next_chunk_index == state.next_chunk_index >= num_saved
    assert torch.equal(state.text, torch.ones(3))
    first = max(0, state.next_chunk_index - NUM_PENDING)
    want = [latents(index) for index in range(first, state.next_chunk_index)]
    assert all(torch.equal(a, b) for a, b in zip(state.pending, want, strict=True))
    log = StreamLog(life / "a.scope", resume=True, at_least=saved.log_offset)
    log.append(opened(resumed_at_chunk=saved.next_chunk_index))
    assert log.failure is None
    log.close()
    history = read_history(life / "a.scope")
    assert (history.num_starts, history.torn_bytes) == (2, 0)
    # The record of the newest chunk follows its snapshot: a resume adds what is not there yet.
    assert sorted(history.finished) in (
        list(range(saved.next_chunk_index)),
        list(range(saved.next_chunk_index - 1)),
    )
    assert len(history.durable) >= num_saved - 1
    with open_log(life / "a.scope") as file:
        reader = LogReader(file)
        for entry in reader:
            if isinstance(entry.record, Finished):
                index = entry.record.chunk_index
                assert reader.blob(entry) == latents(index).numpy().tobytes()
    again = SnapshotStore(life / "snapshot")
    again.save(header(saved.log_offset, 9), state)
    named = {path.name for path in (life / "snapshot").iterdir()}
    assert len(named) == 2 + len(state.pending), "what a killed process left is removed"


def test_a_stream_killed_at_any_change_of_its_disk_can_be_resumed(tmp_path: Path) -> None:
    num_lives, was_left = 0, False
    for life, reported in lives(stream, tmp_path / "lives"):
        num_lives += 1
        if "ended" not in reported:
            check_resumable(life, len(reported))
            continue
        names = {path.name for path in life.iterdir()}
        assert "a.scope" in names or "snapshot" not in names, "the snapshot goes before the log"
        was_left = not names
    assert num_lives > 2 * 4 * NUM_CHUNKS
    assert was_left
