"""The only place that knows how far a stream is: its log, read as the one stream that was seen.

Who resumes a stream keeps its `StreamProgress`; who tells of one reads its `StreamHistory`, which
is as large as the log. Needs no PyTorch.
"""

import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TypeVar

from scope_contracts.envelope import PPEnvelope
from scope_contracts.errors import ContractError, UserInputError, VersionError, WireError
from scope_contracts.log_file import MAGIC, Entry, LogReader, refuse_special
from scope_contracts.log_records import (
    Control,
    Dropped,
    Durable,
    Failed,
    Finished,
    Opened,
    Planned,
    Published,
    Record,
    Segment,
)
from scope_rt.record.progress import StreamProgress

Progress = TypeVar("Progress", bound=StreamProgress)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """The stream was resumed at `chunk_index`, `gap_s` seconds after its last sign of life."""

    chunk_index: int
    gap_s: float
    causes: tuple[Failed, ...] = ()
    """What failed since the start before it; where a process was killed, nothing could be told."""


@dataclass
class StreamHistory(StreamProgress):
    """All that a log tells, for who looks at a stream chunk by chunk; chunks by index, in order."""

    openings: list[Opened] = field(default_factory=list)
    controls: list[Control] = field(default_factory=list)
    envelopes: dict[int, PPEnvelope] = field(default_factory=dict)
    finished: dict[int, Finished] = field(default_factory=dict)
    dropped: dict[int, Dropped] = field(default_factory=dict)
    segments: list[Segment] = field(default_factory=list)
    durable: dict[int, Durable] = field(default_factory=dict)
    failures: list[Failed] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)
    num_lost: int = 0
    """Chunks planned before a restart and again after it."""
    _last_at_s: float = 0.0

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
        if isinstance(record, Opened) and self.openings:
            first, gap_s = max(0, record.resumed_at_chunk), record.at_s - self._last_at_s
            causes = tuple(self.last_failures)
            self.restarts.append(Restart(chunk_index=first, gap_s=gap_s, causes=causes))
        super().add(record)
        match record:
            case Opened():
                self.openings.append(record)
            case Control():
                self.controls.append(record)
            case Planned(envelope=envelope):
                self.envelopes[envelope.chunk_index] = envelope
            case Finished(chunk_index=index):
                self.finished[index] = record
            case Dropped(chunk_index=index):
                self.dropped[index] = record
            case Segment():
                self.segments.append(record)
            case Durable(chunk_index=index):
                self.durable[index] = record
            case Failed():
                self.failures.append(record)
        self._last_at_s = record.at_s

    def forget(self, first: int) -> None:
        """Forget the chunks from `first` on, which are planned again."""
        super().forget(first)
        self.num_lost += sum(index >= first for index in self.envelopes)
        self.controls = [control for control in self.controls if control.chunk_index < first]
        self.envelopes = {i: envelope for i, envelope in self.envelopes.items() if i < first}
        self.finished = {i: record for i, record in self.finished.items() if i < first}
        self.dropped = {i: record for i, record in self.dropped.items() if i < first}
        self.durable = {i: record for i, record in self.durable.items() if i < first}

    def is_retracted(self, chunk: Finished) -> bool:
        """Whether this chunk may be wrong, and none was made in its place."""
        return any(each.covers(chunk.chunk_index, chunk.cache_epoch) for each in self.retractions)


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
    history, places = StreamHistory(), dict[int, Entry]()
    for entry in _added(reader, history):
        if isinstance(entry.record, Finished):
            places[entry.record.chunk_index] = entry
    if not history.openings:
        raise history.damage or WireError("the recording has no whole record; nothing was kept")
    return history, {index: places[index] for index in history.finished}


def read_history(path: Path) -> StreamHistory:
    """All that the log of a stream tells; raises as `read_entries`."""
    return _read(path, StreamHistory())


def read_progress(path: Path) -> StreamProgress:
    """How far the stream of a log is; raises as `read_entries`."""
    return _read(path, StreamProgress())


def read_entries(path: Path, progress: StreamProgress) -> Iterator[Entry]:
    """The records of a log in turn, each once it was added to `progress`; none where there is no
    file, or no whole record in it.

    Latents are stepped over, not read.

    Raises:
        UserInputError: the file cannot be read, is none of ours or is damaged.
    """
    way_out = f"to start the stream anew, delete {path}"
    try:
        refuse_special(path)
        if not path.exists():
            return
    except OSError as error:
        raise UserInputError(
            f"stream log {path}: is no ordinary file, or unreadable ({error.strerror}); {way_out}"
        ) from error
    with open_log(path) as file:
        yield from _added(LogReader(file, thorough=False), progress)
    if progress.damage is not None:
        is_other = isinstance(progress.damage, VersionError)
        what = "of another version" if is_other else "damaged"
        raise UserInputError(
            f"stream log {path}: is {what} ({progress.damage}); {way_out}"
        ) from progress.damage


def entries_again(path: Path, progress: StreamProgress) -> Iterator[Entry]:
    """The records of a log that `progress` was read from, and not those that came since: they may
    be half written. Raises as `read_entries`."""
    for entry in read_entries(path, StreamProgress()) if progress.num_bytes else ():
        yield entry
        if entry.end >= progress.num_bytes:
            return


def video_records(path: Path, progress: StreamProgress) -> Iterator[Segment | Durable | Published]:
    """What is whole of the video by the log at `path`, for a writer that continues it.

    `progress` is what was read there; raises as `read_entries`.
    """
    for entry in entries_again(path, progress):
        match entry.record:
            case Segment() | Published():
                yield entry.record
            case Durable(chunk_index=index, segment=segment):
                if progress.encoded.number_of(index) == segment:
                    yield entry.record


def _read(path: Path, progress: Progress) -> Progress:
    for _ in read_entries(path, progress):
        pass
    return progress


def _added(reader: LogReader, progress: StreamProgress) -> Iterator[Entry]:
    try:
        for entry in reader:
            progress.add(entry.record)
            progress.num_bytes = entry.end
            yield entry
        progress.torn_bytes = reader.torn_bytes
    except ContractError as error:
        progress.damage = error
