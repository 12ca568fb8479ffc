"""What was saved is loaded to the bit, and what was saved before is not written again."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scope_contracts.errors import FieldError, UserInputError
from scope_rt.record.snapshot import SnapshotStore, look
from tests.record.snapshots import HEADER, STATE, Method, State, Text, embeds, same, saved


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
    monkeypatch.setattr(os, "unlink", lambda path: removed.append(Path(path).name))
    store.clear()
    assert removed[:2] == ["state.9", "state.10"]


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


def test_clearing_leaves_nothing_but_what_is_not_ours(tmp_path: Path) -> None:
    store = saved(tmp_path / "s")
    (tmp_path / "s" / ("0" * 32 + ".partial")).write_bytes(b"left by a killed process")
    store.clear()
    assert list(tmp_path.iterdir()) == []
    store = saved(tmp_path / "s")
    (tmp_path / "s" / "notes").write_bytes(b"")
    store.clear()
    assert [path.name for path in (tmp_path / "s").iterdir()] == ["notes"]


def test_a_value_that_cannot_be_saved_is_refused_and_the_snapshot_before_stays(
    tmp_path: Path,
) -> None:
    store = saved(tmp_path / "s")
    wrong: Any = {"prompt": "a"}
    with pytest.raises(FieldError, match="text: got"):
        store.save(HEADER, State(text=wrong))
    assert store.load(State) is not None
