"""A snapshot that is damaged, or of another version or stream, is named and never loaded."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from scope_contracts.envelope import PPEnvelope
from scope_contracts.errors import UserInputError
from scope_contracts.plain import Leaf, to_plain
from scope_contracts.wire import encode
from scope_lab.sample_log import planned
from scope_rt.record import snapshot
from scope_rt.record.snapshot import SnapshotStore, look
from scope_rt.record.snapshot_header import check_identity
from tests.damage import flip
from tests.record.snapshots import HEADER, State, Text, saved


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


def tensor_file(folder: Path) -> Path:
    return max((path for path in folder.iterdir()), key=lambda path: len(path.name))


def test_damage_is_named_and_never_loaded(tmp_path: Path) -> None:
    way_out = f"to start the stream anew, delete {tmp_path / 's'}"
    saved(tmp_path / "s")
    flip(tensor_file(tmp_path / "s"), -1)
    with pytest.raises(UserInputError, match=r"is damaged \(the bytes of .*\); to start") as error:
        SnapshotStore(tmp_path / "s").load(State)
    assert way_out in str(error.value)
    tensor_file(tmp_path / "s").unlink()
    with pytest.raises(UserInputError, match=r"is damaged \(.*: No such file"):
        SnapshotStore(tmp_path / "s").load(State)
    flip(tmp_path / "s" / "state.1", -1)
    with pytest.raises(UserInputError, match=r"is damaged \(the checksum of state"):
        SnapshotStore(tmp_path / "s").header()
    assert look(tmp_path / "s") is None


def test_a_state_of_another_version_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "s")
    with pytest.raises(UserInputError, match=r"is of another version \(message: got"):
        SnapshotStore(tmp_path / "s").load(Text)


def test_the_snapshot_of_another_stream_is_refused_by_what_differs() -> None:
    check_identity(HEADER, HEADER.identity, folder=Path("s"))
    with pytest.raises(UserInputError, match="with seed 7, this one has 8; use that one again"):
        check_identity(HEADER, (("seed", "8"),), folder=Path("s"))
    with pytest.raises(UserInputError, match="with height none, this one has 64"):
        check_identity(HEADER, (*HEADER.identity, ("height", "64")), folder=Path("s"))


def test_of_several_differences_the_first_that_is_given_is_named() -> None:
    """Another recipe gives a model another fingerprint too, which says nothing to a person."""
    theirs = replace(HEADER, identity=(("recipe", "krea-14b"), ("model", "d753")))
    with pytest.raises(UserInputError, match="with recipe krea-14b, this one has longlive"):
        ours = (("recipe", "longlive-1.3b"), ("model", "76e1"))
        check_identity(theirs, ours, folder=Path("s"))
