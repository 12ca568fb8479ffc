"""How far a stream is, in room that its starts, cuts and schedule take: its chunks take none.

A stream that is resumed at a chunk plans that chunk and all after it again, with what was asked for
there. What was logged about them before is then no part of the stream.
"""

from dataclasses import dataclass, field

from scope_contracts.errors import ContractError
from scope_contracts.log_records import (
    Begun,
    Closed,
    Durable,
    Finished,
    Opened,
    Planned,
    Published,
    Record,
    Retracted,
    Scheduled,
    StartFrame,
)
from scope_contracts.retraction import Retraction
from scope_rt.file_digest import FileDigest
from scope_rt.record.runs import Runs


@dataclass(slots=True)
class StreamProgress:
    """What is left of a log's records once they were read in order."""

    num_starts: int = 0
    """Sessions that began the stream or resumed it."""
    run_id: str = ""
    """Of the last of them: the same for every start of the ranks by one launcher."""
    first_opened: Opened | None = None
    """What the first of them ran with."""
    last_opened: Opened | None = None
    """What the last of them ran with."""
    begun: Begun | None = None
    """What was asked for last; `scheduled` belongs to it."""
    begun_at: int = 0
    """The first chunk of the stream that was asked for last."""
    scheduled: list[Scheduled] = field(default_factory=list)
    start_frame: StartFrame | None = None
    """The picture that chunk 0 is, of a stream that begins with one."""
    planned: Runs = field(default_factory=Runs)
    """By epoch, as `shown`."""
    shown: Runs = field(default_factory=Runs)
    encoded: Runs = field(default_factory=Runs)
    """Chunks whose packets are whole, by the segment that has them."""
    last_epoch: int = -1
    """The highest that ever was planned."""
    holds_latents: bool = False
    """Whether latents of a chunk were logged."""
    published: FileDigest | None = None
    """What the joined video held when it was given its name."""
    retractions: list[Retraction] = field(default_factory=list)
    """Chunks that were shown and may be wrong; a restart since has made them again."""
    closed: bool = False
    num_bytes: int = 0
    """Of whole records."""
    torn_bytes: int = 0
    has_retracted: bool = False
    """Whether the last start has."""
    damage: ContractError | None = None
    """Why nothing after the last record could be read, where no crash explains it."""
    _resumed_at: int = 0
    _num_made: int = 0
    """Chunks that the last start has shown; 0 once all of them were verified or retracted."""
    _cut_short: list[int] = field(default_factory=list)
    """The same of each start before that."""
    _retracted_at: list[int] = field(default_factory=list)
    """The byte at which each retraction begins."""

    def add(self, record: Record) -> None:
        """The next record."""
        match record:
            case Opened(resumed_at_chunk=index):
                if self.num_starts:
                    self.forget(index)  # a stream that starts over forgets all
                self.num_starts, self.run_id = self.num_starts + 1, record.run_id
                self.last_opened = record
                self.first_opened = self.first_opened or record
                self._cut_short.append(self._num_made)
                self._resumed_at, self._num_made = index, 0
                self.closed = self.has_retracted = False
            case Begun():
                self.begun, self.scheduled = record, []
                self.begun_at = self.planned.last[0] + 1
            case StartFrame():
                self.start_frame = record
            case Scheduled():
                self.scheduled.append(record)
            case Planned(envelope=envelope):
                self.planned.add(envelope.chunk_index, envelope.cache_epoch)
                self.last_epoch = max(self.last_epoch, envelope.cache_epoch)
            case Finished(chunk_index=index):
                self.add_shown(index, record.cache_epoch)
                self.holds_latents |= record.latents is not None
            case Durable(chunk_index=index):
                self.encoded.add(index, record.segment)
            case Published():
                self.published = FileDigest(num_bytes=record.num_bytes, blake2b=record.digest)
            case Retracted(retraction=retraction):
                self.retractions.append(retraction)
                self._retracted_at.append(self.num_bytes)
                self._num_made, self.has_retracted = 0, True
            case Closed():
                self.closed, self._num_made = True, 0

    def add_shown(self, chunk_index: int, cache_epoch: int) -> None:
        """A chunk was, or will be, shown to its consumer."""
        self.shown.add(chunk_index, cache_epoch)
        self._num_made += 1

    def forget(self, first: int) -> None:
        """Forget the chunks from `first` on, which are planned again."""
        for chunks in (self.planned, self.shown, self.encoded):
            chunks.forget(first)

    @property
    def is_published(self) -> bool:
        """Whether the whole video is under its own name."""
        return self.published is not None

    @property
    def first_made(self) -> int:
        """The first chunk of the last start that is of the stream asked for last."""
        return max(0, self._resumed_at, self.begun_at)

    def num_unverified(self, within: int) -> int:
        """Chunks that are shown, and that a rank made less than `within` chunks before it was lost:
        nobody can verify any more what it held."""
        return sum(min(num, within - 1) for num in (*self._cut_short, self._num_made))

    def first_suspect(self, *, next_chunk: int, log_offset: int) -> int | None:
        """The first chunk before `next_chunk` that was retracted after byte `log_offset` of the
        log, where a snapshot from there still has it; None where there is none."""
        retracted = zip(self.retractions, self._retracted_at, strict=True)
        firsts = [each.first_chunk for each, start in retracted if start >= log_offset]
        first = max(self.begun_at, min(firsts, default=next_chunk))
        return first if first < next_chunk else None
