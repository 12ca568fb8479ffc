"""A log to resume is read once; single records of it are found again by their place.

Eight bytes a chunk, and only until the stream is resumed; then `progress` is all that is kept.
"""

from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

from scope_contracts.envelope import PPEnvelope
from scope_contracts.log_file import Entry, LogReader
from scope_contracts.log_records import (
    UNCHANGED,
    Control,
    Finished,
    Opened,
    Planned,
    Record,
    StartFrame,
)
from scope_rt.record.progress import StreamProgress
from scope_rt.record.reader import open_log, read_entries


class LogIndex:
    """How far the stream of a log is, and where its finished chunks and control input lie."""

    def __init__(self, path: Path) -> None:
        """Raises `UserInputError` as `read_entries`."""
        self.path = path
        self.progress = StreamProgress()
        self._finished_at = array("q")
        """The byte of each chunk of `progress.shown`."""
        self._controls_at: list[tuple[int, int]] = []
        """Chunk and byte."""
        self._steered_at: list[tuple[int, int]] = []
        """The same, of those that changed seed or bias."""
        self.commands: dict[str, int] = {}
        """The chunk at which each command took effect."""
        self._planned_at: dict[int, int] = {}
        """The byte of each plan of which no chunk was finished."""
        self._start_frame: Entry | None = None
        for entry in read_entries(path, self.progress):
            match entry.record:
                case Opened(resumed_at_chunk=first):
                    self._controls_at = [each for each in self._controls_at if each[0] < first]
                    self._steered_at = [each for each in self._steered_at if each[0] < first]
                    self.commands = {k: v for k, v in self.commands.items() if v < first}
                case StartFrame():
                    self._start_frame = entry
                case Control(chunk_index=index) as control:
                    self._controls_at.append((index, entry.start))
                    self.commands |= dict.fromkeys(control.command_ids, index)
                    if control.base_seed != UNCHANGED or control.kv_cache_attention_bias:
                        self._steered_at.append((index, entry.start))
                case Planned(envelope=envelope):
                    self._planned_at[envelope.chunk_index] = entry.start
                case Finished(chunk_index=index):
                    self._planned_at.pop(index, None)
                    del self._finished_at[len(self.progress.shown) - 1 :]
                    self._finished_at.append(entry.start)

    def newest_finished(self, num_chunks: int, *, before: int) -> list[Finished]:
        """The last `num_chunks` that were shown before chunk `before`, or all."""
        end = len(self.progress.shown.between(0, before))
        found = self._read(self._finished_at[max(0, end - num_chunks) : end])
        return [record for record in found if isinstance(record, Finished)]

    def newest_prompt(self, *, before: int) -> Control | None:
        """What took effect last before chunk `before` and had a prompt."""
        places = [start for index, start in self._controls_at if index < before]
        for record in self._read(reversed(places)):
            if isinstance(record, Control) and record.embeds_sha256:
                return record
        return None

    def newest_values(self, *, before: int) -> tuple[int, float]:
        """Base seed and resting bias that were in effect when chunk `before` was planned next."""
        opened = self.progress.first_opened
        assert opened is not None, "asked for of a stream that was begun"
        seed, bias = opened.base_seed, opened.kv_cache_attention_bias
        places = [start for index, start in self._steered_at if index < before]
        for record in self._read(places):
            if isinstance(record, Control):
                seed = seed if record.base_seed == UNCHANGED else record.base_seed
                bias = record.kv_cache_attention_bias or bias
        return seed, bias

    def plan_of(self, chunk_index: int) -> PPEnvelope | None:
        """Of a chunk that was not finished; None where none was planned."""
        start = self._planned_at.get(chunk_index)
        for record in self._read(() if start is None else (start,)):
            if isinstance(record, Planned):
                return record.envelope
        return None

    def controls_from(self, first: int) -> list[Control]:
        """What took effect at chunk `first` and after it."""
        found = self._read(start for index, start in self._controls_at if index >= first)
        return [record for record in found if isinstance(record, Control)]

    def start_latents(self) -> bytes:
        """The blob of `progress.start_frame`, of a stream that has one.

        Raises:
            ContractError: it is damaged.
        """
        assert self._start_frame is not None, "asked for of a stream that begins with a picture"
        with open_log(self.path) as file:
            return LogReader(file).blob(self._start_frame)

    def _read(self, places: Iterable[int]) -> Iterator[Record]:
        with open_log(self.path) as file:
            reader = LogReader(file, thorough=False)
            for start in places:
                yield reader.entry(start).record
