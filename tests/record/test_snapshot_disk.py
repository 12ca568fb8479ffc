"""A disk that fails, fills up or stalls leaves the snapshot before, and is named."""

import errno
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scope_contracts.errors import SnapshotError
from scope_lab.sample_log import opened, planned
from scope_rt.record import snapshot, stream_log
from scope_rt.record.log import NullLog
from scope_rt.record.snapshot import SnapshotStore, look
from scope_rt.record.stream_log import StreamLog
from tests.record.snapshots import HEADER, STATE, Method, State, saved
from tests.record.stalled_disk import StalledDisk
from tests.video.test_full_disk import small_disk

__all__ = ["small_disk"]


def test_a_full_disk_keeps_the_snapshot_before(small_disk: Path) -> None:
    store = saved(small_disk / "s")
    larger = replace(STATE, pending=(torch.ones(1_000_000),))
    with pytest.raises(SnapshotError, match=r"\(No space left on device\), .* is kept; free disk"):
        store.save(replace(HEADER, next_chunk_index=5), larger)
    assert SnapshotStore(small_disk / "s").load(State) is not None
    store.save(replace(HEADER, next_chunk_index=6), STATE)
    header = look(small_disk / "s")
    assert header is not None
    assert header.next_chunk_index == 6


def test_a_folder_that_cannot_be_made_or_removed_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_bytes(b"")
    with pytest.raises(SnapshotError, match=r"cannot write the snapshot .*/taken"):
        saved(tmp_path / "taken")
    (tmp_path / "s" / "state.1").mkdir(parents=True)
    with pytest.raises(SnapshotError, match=r"cannot remove the snapshot .*/s \("):
        SnapshotStore(tmp_path / "s").clear()


@pytest.fixture
def stalled_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[StalledDisk]:
    disk = StalledDisk()
    monkeypatch.setattr(os, "write", disk.waiting(os.write))
    monkeypatch.setattr(Path, "read_bytes", disk.waiting(Path.read_bytes))
    monkeypatch.setattr(snapshot, "STALL_TIMEOUT_S", 0.5)
    monkeypatch.setattr(snapshot, "_LOOK_TIMEOUT_S", 0.2)
    yield disk
    disk.back.set()


def test_a_save_that_stalls_is_named_and_never_replaces_the_one_before(
    tmp_path: Path, stalled_disk: StalledDisk
) -> None:
    store = saved(tmp_path / "s")
    before = {path: path.read_bytes() for path in (tmp_path / "s").iterdir()}
    stalled_disk.stalls.set()
    with pytest.raises(SnapshotError, match=r"no answer from the disk for 0.5 s\), .*; bring"):
        store.save(HEADER, State(text=None, pending=(torch.ones(5),)))
    assert look(tmp_path / "s") is None, "who watches does not wait for ever"
    assert not stalled_disk.back.is_set()
    stalled_disk.back.set()
    stalled_disk.stalls.clear()
    store._disk.settle(timeout_s=20)
    assert {path: path.read_bytes() for path in (tmp_path / "s").iterdir()} == before


def test_a_removal_that_stalls_is_named_and_removes_nothing_later(
    tmp_path: Path, stalled_disk: StalledDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = saved(tmp_path / "s")
    tensors = {path for path in (tmp_path / "s").iterdir() if not path.name.startswith("state")}
    assert tensors
    monkeypatch.setattr(os, "unlink", stalled_disk.waiting(os.unlink))
    stalled_disk.stalls.set()
    with pytest.raises(
        SnapshotError, match=r"cannot remove .* \(no answer from the disk for 0.5 s"
    ):
        store.clear()
    stalled_disk.back.set()
    stalled_disk.stalls.clear()
    store._disk.settle(timeout_s=20)
    assert tensors == set((tmp_path / "s").iterdir()), "another process may use them by now"


def test_a_state_is_saved_though_nobody_waits_where_no_log_is_kept(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "s")
    store.begin(HEADER, STATE, log=NullLog())
    assert store.header() is not None


def test_a_state_is_saved_once_its_log_is_written_and_names_its_end(tmp_path: Path) -> None:
    with closing(StreamLog(tmp_path / "log")) as log:
        log.append(opened())
        store = SnapshotStore(tmp_path / "s")
        store.save(HEADER, STATE, log=log)
        header = store.header()
        assert header is not None
        assert header.log_offset == (tmp_path / "log").stat().st_size == log.offset


def fill_disk(file: int, start: int, data: bytes) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_where_the_log_fails_before_it_is_written_nothing_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(StreamLog(tmp_path / "log")) as log:
        log.append(opened())
        store = SnapshotStore(tmp_path / "s")
        store.save(HEADER, STATE, log=log)
        monkeypatch.setattr(stream_log, "write_at", fill_disk)
        log.append(planned(0))
        store.save(replace(HEADER, next_chunk_index=5), STATE, log=log)
        assert log.failure is not None
        header = store.header()
        assert header is not None
        assert header.next_chunk_index == HEADER.next_chunk_index


def test_a_log_that_stalls_ends_and_a_snapshot_that_stalls_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stalled_disk: StalledDisk
) -> None:
    monkeypatch.setattr(stream_log, "STALL_TIMEOUT_S", 0.5)
    monkeypatch.setattr(stream_log, "_CLOSE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(os, "pwrite", stalled_disk.waiting(os.pwrite))
    logs = [StreamLog(tmp_path / name) for name in "ab"]
    for log in logs:
        log.append(opened())
        log.flush()
    stalled_disk.stalls.set()
    logs[0].append(planned(0))
    SnapshotStore(tmp_path / "s").save(HEADER, STATE, log=logs[0])
    assert "no answer from the disk" in (logs[0].failure or "")
    with pytest.raises(SnapshotError, match=r"no answer from the disk for 0.5 s"):
        SnapshotStore(tmp_path / "s").save(HEADER, STATE, log=logs[1])
    stalled_disk.back.set()
    for log in logs:
        log.close()
        log._disk.settle(timeout_s=20)
    assert SnapshotStore(tmp_path / "s").header() is None


def test_a_save_that_was_interrupted_comes_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stalled_disk: StalledDisk
) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(snapshot, "answer", interrupt)
    stalled_disk.stalls.set()
    store = SnapshotStore(tmp_path / "s")
    with pytest.raises(KeyboardInterrupt):
        store.save(HEADER, STATE)
    stalled_disk.back.set()
    store._disk.settle(timeout_s=20)
    assert list((tmp_path / "s").iterdir()) == []


def test_a_write_that_comes_late_cannot_spoil_a_newer_snapshot(tmp_path: Path) -> None:
    store = saved(tmp_path / "s")
    with (tmp_path / "s" / "state.2.partial").open("wb", buffering=0) as late:
        store.save(replace(HEADER, next_chunk_index=5), STATE)
        late.write(b"an older state")
    assert store.load(State) is not None


def test_an_error_between_tensors_and_state_leaves_the_snapshot_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, replace_file = saved(tmp_path / "s"), os.replace

    def refuse_state(source: Any, target: Any) -> None:
        if Path(target).name == "state.2":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        replace_file(source, target)

    monkeypatch.setattr(os, "replace", refuse_state)
    with pytest.raises(SnapshotError):
        store.save(HEADER, State(text=None, pending=(torch.ones(5),)))
    loaded = SnapshotStore(tmp_path / "s").load(State)
    assert loaded is not None
    assert loaded[1].method is Method.LERP
