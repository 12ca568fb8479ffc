"""The only place that knows how far a stream is: its log, read as the one stream that was seen.

A stream that is resumed at a chunk plans that chunk and all after it again, with what was asked for
there. What was logged about them before is then no part of the stream, only a count of lost work.
Needs no PyTorch.
"""

import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from scope_contracts.envelope import PPEnvelope
from scope_contracts.errors import ContractError, UserInputError, WireError
from scope_contracts.log_file import MAGIC, Entry, LogReader, refuse_special
from scope_contracts.log_records import (
    Begun,
    Closed,
    Control,
    Dropped,
    Durable,
    Failed,
    Finished,
    Opened,
    Planned,
    Published,
    Record,
    Retracted,
    Scheduled,
    Segment,
)
from scope_contracts.retraction import Retraction
from scope_rt.file_digest import FileDigest


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """The stream was resumed at `chunk_index`, `gap_s` seconds after its last sign of life."""

    chunk_index: int
    gap_s: float
    causes: tuple[Failed, ...] = ()
    """What failed since the start before it; where a process was killed, nothing could be told."""


@dataclass(slots=True)
class StreamHistory:
    """What a log tells; chunks by their index, in order."""

    openings: list[Opened] = field(default_factory=list)
    begun: Begun | None = None
    """What was asked for last; `scheduled` belongs to it."""
    scheduled: list[Scheduled] = field(default_factory=list)
    controls: list[Control] = field(default_factory=list)
    envelopes: dict[int, PPEnvelope] = field(default_factory=dict)
    finished: dict[int, Finished] = field(default_factory=dict)
    dropped: dict[int, Dropped] = field(default_factory=dict)
    segments: list[Segment] = field(default_factory=list)
    durable: dict[int, Durable] = field(default_factory=dict)
    published: FileDigest | None = None
    """What the joined video held when it was given its name."""
    retractions: list[Retraction] = field(default_factory=list)
    """Chunks that were shown and may be wrong; a restart since has made them again."""
    failures: list[Failed] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)
    num_lost: int = 0
    """Chunks planned before a restart and again after it."""
    closed: bool = False
    num_bytes: int = 0
    """Of whole records."""
    torn_bytes: int = 0
    has_retracted: bool = False
    """Whether the last start has."""
    damage: ContractError | None = None
    """Why nothing after the last record could be read, where no crash explains it."""
    _last_at_s: float = 0.0
    _begun_at: int = 0
    _num_made: int = 0
    """Chunks that the last start has shown; 0 once all of them were verified or retracted."""
    _cut_short: list[int] = field(default_factory=list)
    """The same of each start before that."""
    _retracted_at: int = 0
    """The byte at which the newest retraction begins."""

    @property
    def num_starts(self) -> int:
        """Sessions that began the stream or resumed it."""
        return len(self.openings)

    @property
    def is_published(self) -> bool:
        """Whether the whole video is under its own name."""
        return self.published is not None

    @property
    def video(self) -> list[Segment | Durable]:
        """What is whole of the video, for a writer that continues it."""
        return [*self.segments, *self.durable.values()]

    @property
    def last_failures(self) -> list[Failed]:
        """Those that no restart followed."""
        return self.failures[sum(len(restart.causes) for restart in self.restarts) :]

    @property
    def opened(self) -> Opened:
        """The stream as it began."""
        return self.openings[0]

    def add(self, record: Record) -> None:
        """The next record."""
        match record:
            case Opened(resumed_at_chunk=index):
                self.closed = False
                self._cut_short.append(self._num_made)
                self._num_made, self.has_retracted = 0, False
                if self.openings:
                    self._resume(index, gap_s=record.at_s - self._last_at_s)
                self.openings.append(record)
            case Begun():
                self.begun, self.scheduled = record, []
                self._begun_at = max(self.envelopes, default=-1) + 1
            case Scheduled():
                self.scheduled.append(record)
            case Control():
                self.controls.append(record)
            case Planned(envelope=envelope):
                self.envelopes[envelope.chunk_index] = envelope
            case Finished(chunk_index=index):
                self.finished[index] = record
                self._num_made += 1
            case Dropped(chunk_index=index):
                self.dropped[index] = record
            case Segment():
                self.segments.append(record)
            case Durable(chunk_index=index):
                self.durable[index] = record
            case Published():
                self.published = FileDigest(num_bytes=record.num_bytes, blake2b=record.digest)
            case Retracted(retraction=retraction):
                self.retractions.append(retraction)
                self._retracted_at = self.num_bytes
                self._num_made, self.has_retracted = 0, True
            case Failed():
                self.failures.append(record)
            case Closed():
                self.closed, self._num_made = True, 0
        self._last_at_s = record.at_s

    @property
    def begun_at(self) -> int:
        """The first chunk of the stream that was asked for last."""
        return self._begun_at

    @property
    def first_made(self) -> int:
        """The first chunk of the last start that is of the stream asked for last."""
        return max(0, self.openings[-1].resumed_at_chunk, self._begun_at)

    @property
    def last_epoch(self) -> int:
        """The highest that was planned; -1 before the first chunk."""
        return max((each.cache_epoch for each in self.envelopes.values()), default=-1)

    def num_unverified(self, within: int) -> int:
        """Chunks that are shown, and that a rank made less than `within` chunks before it was lost:
        nobody can verify any more what it held."""
        return sum(min(num, within - 1) for num in (*self._cut_short, self._num_made))

    def is_suspect(self, *, next_chunk: int, log_offset: int) -> bool:
        """Whether a snapshot before `next_chunk` and byte `log_offset` of the log has chunks that
        were retracted after it was saved."""
        if not self.retractions or self._retracted_at < log_offset:
            return False
        return self.retractions[-1].first_chunk < next_chunk

    def is_retracted(self, chunk: Finished) -> bool:
        """Whether this chunk may be wrong, and none was made in its place."""
        return any(each.covers(chunk.chunk_index, chunk.cache_epoch) for each in self.retractions)

    def _resume(self, first: int, *, gap_s: float) -> None:
        """A stream that starts over forgets all."""
        causes = tuple(self.last_failures)
        self.restarts.append(Restart(chunk_index=max(0, first), gap_s=gap_s, causes=causes))
        self.forget(first)

    def forget(self, first: int) -> None:
        """Forget the chunks from `first` on, which are planned again."""
        self.num_lost += sum(index >= first for index in self.envelopes)
        self.controls = [control for control in self.controls if control.chunk_index < first]
        self.envelopes = {i: envelope for i, envelope in self.envelopes.items() if i < first}
        self.finished = {i: record for i, record in self.finished.items() if i < first}
        self.dropped = {i: record for i, record in self.dropped.items() if i < first}
        self.durable = {i: record for i, record in self.durable.items() if i < first}


def open_log(path: Path) -> BinaryIO:
    """Open a stream log to read.

    Raises:
        UserInputError: the file cannot be read, or is none.
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


def read_stream(reader: LogReader) -> tuple[StreamHistory, dict[int, Entry]]:
    """The stream of a log, and where its finished chunks lie; damage ends it early.

    Raises:
        ContractError: there is no whole record.
    """
    history, places = _read(reader)
    if not history.openings:
        raise history.damage or WireError("the recording has no whole record; nothing was kept")
    return history, places


def read_history(path: Path) -> StreamHistory:
    """How far the stream of a log is; nothing where there is no file, or no whole record in it.

    Latents are stepped over, not read.

    Raises:
        UserInputError: the file cannot be read, is none of ours or is damaged.
    """
    way_out = f"to start the stream anew, delete {path}"
    try:
        refuse_special(path)
        if not path.exists():
            return StreamHistory()
    except OSError as error:
        raise UserInputError(
            f"stream log {path}: is no ordinary file, or unreadable ({error.strerror}); {way_out}"
        ) from error
    with open_log(path) as file:
        history, _ = _read(LogReader(file, check_blobs=False))
    if history.damage is not None:
        raise UserInputError(
            f"stream log {path}: is damaged ({history.damage}); {way_out}"
        ) from history.damage
    return history


def _read(reader: LogReader) -> tuple[StreamHistory, dict[int, Entry]]:
    history, places = StreamHistory(), dict[int, Entry]()
    try:
        for entry in reader:
            history.add(entry.record)
            history.num_bytes = entry.end
            if isinstance(entry.record, Finished):
                places[entry.record.chunk_index] = entry
        history.torn_bytes = reader.torn_bytes
    except ContractError as error:
        history.damage = error
    return history, {index: places[index] for index in history.finished}
