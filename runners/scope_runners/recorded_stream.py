"""A recording as the one stream that was seen, across its restarts.

A stream that is resumed at a chunk plans that chunk and all after it again, with what was asked for
there. What was recorded about them before is then no part of the stream, only a count of lost work.
"""

import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from scope_contracts.envelope import PPEnvelope
from scope_contracts.errors import ContractError, UserInputError, WireError
from scope_contracts.log_file import MAGIC, Entry, LogReader
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """The stream was resumed at `chunk_index`, `gap_s` seconds after its last sign of life."""

    chunk_index: int
    gap_s: float
    causes: tuple[Failed, ...] = ()
    """What failed since the start before it; where a process was killed, nothing could be told."""


@dataclass(slots=True)
class RecordedStream:
    """What a recording tells; chunks by their index, in order."""

    openings: list[Opened] = field(default_factory=list)
    controls: list[Control] = field(default_factory=list)
    envelopes: dict[int, PPEnvelope] = field(default_factory=dict)
    finished: dict[int, Finished] = field(default_factory=dict)
    dropped: dict[int, Dropped] = field(default_factory=dict)
    failures: list[Failed] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)
    num_lost: int = 0
    """Chunks planned before a restart and again after it."""
    closed: bool = False
    torn_bytes: int = 0
    damage: ContractError | None = None
    """Why nothing after the last record could be read, where no crash explains it."""

    @property
    def last_failures(self) -> list[Failed]:
        """Those that no restart followed."""
        return self.failures[sum(len(restart.causes) for restart in self.restarts) :]

    @property
    def opened(self) -> Opened:
        """The stream as it began."""
        return self.openings[0]

    def add(self, record: Record, *, after_s: float) -> None:
        """The next record; the one before was written at `after_s`."""
        self.closed = isinstance(record, Closed)
        match record:
            case Opened(resumed_at_chunk=index):
                if self.openings:
                    self._resume(index, gap_s=record.at_s - after_s)
                self.openings.append(record)
            case Control():
                self.controls.append(record)
            case Planned(envelope=envelope):
                self.envelopes[envelope.chunk_index] = envelope
            case Finished(chunk_index=index):
                self.finished[index] = record
            case Dropped(chunk_index=index):
                self.dropped[index] = record
            case Failed():
                self.failures.append(record)

    def _resume(self, first: int, *, gap_s: float) -> None:
        """Forget what is planned again; a stream that starts over forgets all."""
        causes = tuple(self.last_failures)
        self.restarts.append(Restart(chunk_index=max(0, first), gap_s=gap_s, causes=causes))
        self.num_lost += sum(index >= first for index in self.envelopes)
        self.controls = [control for control in self.controls if control.chunk_index < first]
        self.envelopes = {i: envelope for i, envelope in self.envelopes.items() if i < first}
        self.finished = {i: record for i, record in self.finished.items() if i < first}
        self.dropped = {i: record for i, record in self.dropped.items() if i < first}


def open_recording(path: Path) -> BinaryIO:
    """Open a recording to read.

    Raises:
        UserInputError: the file cannot be read.
    """
    try:
        # Looked at before it is opened: opening a pipe waits for somebody to write to it.
        if not stat.S_ISREG(path.stat().st_mode):
            raise UserInputError(
                f"the recording {path} is no ordinary file; give a file that --record wrote"
            )
        file = path.open("rb")
    except OSError as error:
        raise UserInputError(
            f"cannot read the recording {path} ({error.strerror}); give a file that --record wrote"
        ) from error
    if not MAGIC.startswith(file.read(len(MAGIC))):
        file.close()
        raise UserInputError(f"{path} is no recording; give a file that --record wrote")
    return file


def read_stream(reader: LogReader) -> tuple[RecordedStream, dict[int, Entry]]:
    """The stream of a recording, and where its finished chunks lie; damage ends it early.

    Raises:
        ContractError: there is no whole record.
    """
    stream, places, after_s = RecordedStream(), dict[int, Entry](), 0.0
    try:
        for entry in reader:
            stream.add(entry.record, after_s=after_s)
            after_s = entry.record.at_s
            if isinstance(entry.record, Finished):
                places[entry.record.chunk_index] = entry
    except ContractError as error:
        stream.damage = error
    if not stream.openings:
        raise stream.damage or WireError("the recording has no whole record; nothing was kept")
    stream.torn_bytes = reader.torn_bytes if stream.damage is None else 0
    return stream, {index: places[index] for index in stream.finished}
