"""Whose state a snapshot holds: no stream is resumed as another one."""

from dataclasses import dataclass
from pathlib import Path

from scope_contracts.errors import UserInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotHeader:
    """Whose state it is, and how far that stream is.

    `run_id` is the same for every start of the ranks by one launcher, `identity` what must be equal
    for a stream to be resumed, `log` the file of which the state belongs to byte `log_offset`.
    """

    run_id: str
    identity: tuple[tuple[str, str], ...]
    log: str
    log_offset: int
    next_chunk_index: int


def check_identity(
    header: SnapshotHeader, identity: tuple[tuple[str, str], ...], *, folder: Path
) -> None:
    """Refuse to resume the stream of a snapshot as another one.

    Raises:
        UserInputError: naming what differs.
    """
    theirs, ours = dict(header.identity), dict(identity)
    for name in (*ours, *(theirs.keys() - ours.keys())):
        if theirs.get(name) != ours.get(name):
            their, our = (each.get(name, "none") for each in (theirs, ours))
            raise other_stream(folder, name, their, our)


def other_stream(folder: Path, name: str, theirs: str, ours: str) -> UserInputError:
    """The snapshot is of a stream with another `name`."""
    return UserInputError(
        f"the snapshot {folder} is of a stream with {name} {theirs}, this one has {ours}; "
        f"use that one again, or to start anew, delete {folder}"
    )
