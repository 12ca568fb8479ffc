"""A snapshot is whole or named as damaged; what was saved before is not written again."""

import errno
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from scope_contracts.envelope import PPEnvelope
from scope_contracts.errors import FieldError, SnapshotError, UserInputError
from scope_contracts.plain import Leaf, to_plain
from scope_contracts.wire import encode
from scope_rt.record import snapshot, stream_log
from scope_rt.record.snapshot import SnapshotStore, look
from scope_rt.record.snapshot_header import SnapshotHeader, check_identity
from scope_rt.record.stream_log import StreamLog
from tests.record.stalled_disk import StalledDisk
from tests.stream_logs import opened, planned
from tests.video.test_full_disk import small_disk

__all__ = ["small_disk"]
HEADER = SnapshotHeader(
    run_id="run", identity=(("seed", "7"),), log="a.scope", log_offset=99, next_chunk_index=4
)


class Method(StrEnum):
    LERP = "lerp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    prompt: str
    embeds: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    text: Text | None
    method: Method | None = None
    pending: tuple[Tensor, ...] = ()
    times: tuple[tuple[str, float], ...] = ()


def embeds() -> Tensor:
    """As a text encoder pads them: most of it zeros."""
    return torch.cat([torch.ones(1, 3, 64), torch.zeros(1, 509, 64)], dim=1)


STATE = State(
    text=Text(prompt="a red circle, " * 1000, embeds=embeds()),
    method=Method.LERP,
    pending=(torch.arange(6, dtype=torch.bfloat16).reshape(1, 2, 3), torch.tensor(5)),
    times=(("plan", 0.25),) * 300,
)


def saved(folder: Path, state: State = STATE) -> SnapshotStore:
    store = SnapshotStore(folder)
    store.save(HEADER, state)
    return store


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def test_what_was_saved_is_loaded_bit_for_bit_by_another_process(tmp_path: Path) -> None:
    saved(tmp_path / "s")
    store = SnapshotStore(tmp_path / "s")
    assert store.header() == HEADER == look(tmp_path / "s")
    loaded = store.load(State)
    assert loaded is not None
    header, state = loaded
    assert header == HEADER
    assert state.text is not None
    assert STATE.text is not None
    assert (state.text.prompt, state.method, state.times) == (
        *(STATE.text.prompt, Method.LERP, STATE.times),
    )
    assert same(state.text.embeds, STATE.text.embeds)
    assert all(same(a, b) for a, b in zip(state.pending, STATE.pending, strict=True))


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (3,)])
def test_tensors_of_any_shape_and_of_zeros_only_are_kept(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    store = saved(tmp_path / "s", State(text=None, pending=(torch.zeros(shape),)))
    loaded = store.load(State)
    assert loaded is not None
    assert same(loaded[1].pending[0], torch.zeros(shape))


def test_where_nothing_was_saved_nothing_is_loaded(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path / "s")
    assert store.load(State) is None
    assert store.header() is None is look(tmp_path / "s")
    store.clear()
    assert list(tmp_path.iterdir()) == []


def test_zeros_at_the_end_of_a_tensor_take_no_space(tmp_path: Path) -> None:
    saved(tmp_path / "s", State(text=Text(prompt="", embeds=embeds())))
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "s").iterdir()}
    del sizes["state.1"]
    assert list(sizes.values()) == [3 * 64 * 4]


def test_a_tensor_that_was_saved_or_loaded_before_is_not_written_again(tmp_path: Path) -> None:
    store = saved(tmp_path / "s")
    kept = {path: path.stat().st_ino for path in (tmp_path / "s").iterdir()}
    store.save(replace(HEADER, next_chunk_index=5), replace(STATE, pending=STATE.pending[1:]))
    store = SnapshotStore(tmp_path / "s")
    loaded = store.load(State)
    assert loaded is not None
    store.save(replace(HEADER, next_chunk_index=6), loaded[1])
    there = {path: path.stat().st_ino for path in (tmp_path / "s").iterdir()}
    assert len(there) == len(kept) - 1, "a tensor that no state names is removed"
    del kept[tmp_path / "s" / "state.1"]
    assert all(kept.get(path, inode) == inode for path, inode in there.items())


def test_a_tensor_whose_file_was_tidied_away_is_written_again(tmp_path: Path) -> None:
    """A cleaner of old files finds a sink or a prompt, which no later save would touch."""
    store = saved(tmp_path / "s")
    for path in (tmp_path / "s").iterdir():
        path.unlink()
    store.save(HEADER, STATE)
    loaded = SnapshotStore(tmp_path / "s").load(State)
    assert loaded is not None
    assert loaded[1].text is not None
    assert same(loaded[1].text.embeds, embeds())


def test_of_two_states_the_newest_counts_and_the_next_save_leaves_one(tmp_path: Path) -> None:
    """A process may be killed before it removes the state that it replaces."""
    store = saved(tmp_path / "s")
    state = (tmp_path / "s" / "state.1").read_bytes()
    for index in range(2, 11):
        store.save(replace(HEADER, next_chunk_index=index), STATE)
    (tmp_path / "s" / "state.9").write_bytes(state)
    header = SnapshotStore(tmp_path / "s").header()
    assert header is not None
    assert header.next_chunk_index == 10
    store.save(replace(HEADER, next_chunk_index=11), STATE)
    assert [path.name for path in (tmp_path / "s").glob("state*")] == ["state.11"]


def test_an_older_state_never_counts_while_a_snapshot_is_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = saved(tmp_path / "s")
    (tmp_path / "s" / "state.1").rename(tmp_path / "s" / "state.10")
    (tmp_path / "s" / "state.9").write_bytes(b"an older one")
    removed: list[str] = []
    monkeypatch.setattr(Path, "unlink", lambda path, **_: removed.append(path.name))
    store.clear()
    assert removed == ["state.9", "state.10"]


def test_a_state_that_is_replaced_while_it_is_looked_at_is_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, read_bytes, num_reads = saved(tmp_path / "s"), Path.read_bytes, 0

    def replaced_meanwhile(path: Path) -> bytes:
        nonlocal num_reads
        num_reads += 1
        if num_reads == 1:
            store.save(replace(HEADER, next_chunk_index=5), STATE)
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", replaced_meanwhile)
    header = look(tmp_path / "s")
    assert header is not None
    assert (header.next_chunk_index, num_reads) == (5, 2)
    monkeypatch.undo()
    (tmp_path / "s" / "state.3").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserInputError, match="cannot read the snapshot"):
        SnapshotStore(tmp_path / "s").header()


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    envelope: PPEnvelope


def test_an_envelope_is_kept_as_it_travels(tmp_path: Path) -> None:
    store, state = SnapshotStore(tmp_path / "s"), Planned(envelope=planned(0).envelope)
    store.save(HEADER, state)
    loaded = store.load(Planned)
    assert loaded is not None
    assert loaded[1] == state
    assert encode(state.envelope) in (tmp_path / "s" / "state.1").read_bytes()


def test_a_snapshot_of_an_earlier_version_is_found_and_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state had no number, and held envelopes as maps."""
    monkeypatch.setattr(snapshot, "_ENCODED", Leaf(lower=to_plain, lift=to_plain))
    SnapshotStore(tmp_path / "s").save(HEADER, Planned(envelope=planned(0).envelope))
    monkeypatch.undo()
    (tmp_path / "s" / "state.1").rename(tmp_path / "s" / "state")
    store = SnapshotStore(tmp_path / "s")
    assert store.header() == HEADER
    with pytest.raises(UserInputError, match=r"of another version .envelope: got .*canonical by"):
        store.load(Planned)


def test_clearing_leaves_nothing_but_what_is_not_ours(tmp_path: Path) -> None:
    store = saved(tmp_path / "s")
    (tmp_path / "s" / ("0" * 32 + ".partial")).write_bytes(b"left by a killed process")
    store.clear()
    assert list(tmp_path.iterdir()) == []
    store = saved(tmp_path / "s")
    (tmp_path / "s" / "notes").write_bytes(b"")
    store.clear()
    assert [path.name for path in (tmp_path / "s").iterdir()] == ["notes"]


def tensor_file(folder: Path) -> Path:
    return max((path for path in folder.iterdir()), key=lambda path: len(path.name))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_damage_is_named_and_never_loaded(tmp_path: Path) -> None:
    way_out = f"to start the stream anew, delete {tmp_path / 's'}"
    saved(tmp_path / "s")
    flip(tensor_file(tmp_path / "s"))
    with pytest.raises(UserInputError, match=r"is damaged \(the bytes of .*\); to start") as error:
        SnapshotStore(tmp_path / "s").load(State)
    assert way_out in str(error.value)
    tensor_file(tmp_path / "s").unlink()
    with pytest.raises(UserInputError, match=r"is damaged \(.*: No such file"):
        SnapshotStore(tmp_path / "s").load(State)
    flip(tmp_path / "s" / "state.1")
    with pytest.raises(UserInputError, match=r"is damaged \(the checksum of state"):
        SnapshotStore(tmp_path / "s").header()
    assert look(tmp_path / "s") is None


def test_a_state_of_another_version_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "s")
    with pytest.raises(UserInputError, match=r"is of another version \(message: got"):
        SnapshotStore(tmp_path / "s").load(Text)


def test_a_value_that_cannot_be_saved_is_refused_and_the_snapshot_before_stays(
    tmp_path: Path,
) -> None:
    store = saved(tmp_path / "s")
    wrong: Any = {"prompt": "a"}
    with pytest.raises(FieldError, match="text: got"):
        store.save(HEADER, State(text=wrong))
    assert store.load(State) is not None


def test_the_snapshot_of_another_stream_is_refused_by_what_differs() -> None:
    check_identity(HEADER, HEADER.identity, folder=Path("s"))
    with pytest.raises(UserInputError, match="with seed 7, this one has 8; use that one again"):
        check_identity(HEADER, (("seed", "8"),), folder=Path("s"))
    with pytest.raises(UserInputError, match="with height None, this one has 64"):
        check_identity(HEADER, (*HEADER.identity, ("height", "64")), folder=Path("s"))


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
        monkeypatch.setattr(stream_log, "_write_at", fill_disk)
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
