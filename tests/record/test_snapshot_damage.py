"""No byte of a snapshot can be flipped without a word, in its state or in a tensor's file."""

from pathlib import Path

import pytest
import torch

from scope_contracts.errors import UserInputError
from scope_rt.record.snapshot import SnapshotStore
from tests.record.snapshots import HEADER, State, Text, saved

STATE = State(
    text=Text(prompt="a red circle", embeds=torch.arange(40.0).reshape(1, 4, 10)),
    pending=(torch.tensor(5), torch.arange(7, dtype=torch.bfloat16)),
)


def test_a_flipped_byte_anywhere_is_named_and_what_is_there_stays(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    saved(folder, STATE)
    files = sorted(folder.iterdir())
    assert len(files) == 1 + 3
    for path in files:
        whole = path.read_bytes()
        for position in range(len(whole)):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << position % 8
            path.write_bytes(damaged)
            with pytest.raises(UserInputError, match=f"the snapshot {folder} is damaged"):
                SnapshotStore(folder).load(State)
        path.write_bytes(whole)
    loaded = SnapshotStore(folder).load(State)
    assert loaded is not None
    assert loaded[0] == HEADER


def test_a_tensor_file_of_another_length_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    saved(folder, STATE)
    path = max(folder.iterdir(), key=lambda file: file.name)
    assert path.name == "state.1"
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for changed in (whole[:-1], whole + b"\x00", b""):
            path.write_bytes(changed)
            with pytest.raises(UserInputError, match="is damaged"):
                SnapshotStore(folder).load(State)
        path.write_bytes(whole)
