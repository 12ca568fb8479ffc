"""Where rank0 shows chunks: the video, its ledger, and a record of every chunk.

Whoever is to resume the stream finds its segments, log and snapshot as this left them.
"""

import time
from contextlib import suppress

from scope_contracts.errors import (
    RecordingError,
    ScopeError,
    UserInputError,
)
from scope_contracts.integrity import IntegrityLevel
from scope_contracts.log_records import Durable, Published, Segment
from scope_rt.control.chunk import Chunk
from scope_rt.record.log import Log
from scope_rt.record.progress import StreamProgress
from scope_rt.record.snapshot import SnapshotStore
from scope_rt.session import StreamSession
from scope_rt.video.writer import VideoWriter
from scope_runners.chunk_record import ChunkRecord
from scope_runners.earlier_chunks import earlier_chunks
from scope_runners.job import StreamJob
from scope_runners.leftovers import check_nothing_is_lost
from scope_runners.outputs import check_no_shared_names
from scope_runners.verify import check_written
from scope_runners.wording import counted


class _Ledger:
    """The stream's log, and how long encoding each chunk took, whatever becomes of the log."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self.encode_ms: dict[int, float] = {}

    def append(self, record: Segment | Durable | Published) -> None:
        """What the video's writer has to tell."""
        if isinstance(record, Durable):
            self.encode_ms[record.chunk_index] = record.encode_ms
        self._log.append(record)


class Stage:
    """Where chunks are shown: the video, and a record of each."""

    def __init__(self, job: StreamJob, session: StreamSession) -> None:
        self.files, self.resumes = job.files, session.resumed_at_chunk is not None
        self._resumed = resumed = session.resumed
        logged = None if resumed is None else resumed.progress
        check_nothing_is_lost(job, resumes=self.resumes, progress=logged)
        progress = logged or StreamProgress()
        self.num_starts = progress.num_starts
        """Processes that had this stream before this one."""
        self.made_before = progress.last_opened
        """What the last of those ran with."""
        is_verified = job.setup.config.integrity.level is not IntegrityLevel.OFF
        self.num_unverified = progress.num_unverified(job.setup.verify_within) * is_verified
        """Chunks that lost ranks made of what nobody can verify any more."""
        self.published = progress.published if self.files.video.exists() else None
        """The video, where an earlier process was ended between joining it and its own end."""
        if self.published and (damage := check_written(self.files.video, self.published)):
            raise UserInputError(
                f"{self.files.video} is not the video that was written ({damage}); bring that one "
                "back, or choose another --out and make it anew"
            )
        way_out = f"to start anew, delete {self.files.snapshot} and leave --resume out"
        self.num_before = num_there = len(progress.encoded)
        """Chunks that earlier processes brought into the video."""
        if num_there < session.num_acknowledged_before and self.published is None:
            raise UserInputError(
                f"{self.files.video}: the resume point is after "
                f"{counted(session.num_acknowledged_before, 'chunk')}, and {num_there} are there; "
                f"{way_out}"
            )
        self.log = session.take_log()
        self._ledger = _Ledger(self.log)
        try:
            check_no_shared_names(self.files)  # again: one may have begun meanwhile
            self.writer = VideoWriter(
                self.files.video,
                width=job.setup.width,
                height=job.setup.height,
                fps=job.setup.recipe.fps,
                trace=session.trace,
                ledger=self._ledger,
                earlier=() if self.published else session.earlier_video(),
                keep_on_error=True,
            )
        except ScopeError as error:
            self.log.close()
            if not (self.resumes and isinstance(error, UserInputError)):
                raise
            raise UserInputError(f"{error}; {way_out}") from error
        self._chunks: dict[int, ChunkRecord] = {}
        self.retractions = list(session.retractions)
        """Chunks that were shown and may have been wrong. The video of a resumed stream has none
        of them: it ends before them, and those made again follow."""
        self.first_frame_s: float | None = None

    @property
    def num_chunks(self) -> int:
        """Chunks in the video, earlier processes' too."""
        return self.num_before + len(self._chunks)

    def show(self, chunk: Chunk) -> None:
        """Tell of a chunk and write it."""
        if self.first_frame_s is None:
            self.first_frame_s = time.perf_counter()
        self._chunks[chunk.chunk_index] = ChunkRecord.of(chunk)
        self.writer.write(chunk.frames, chunk_index=chunk.chunk_index, crc32=chunk.frames_crc32)

    def records(self) -> list[ChunkRecord]:
        """All chunks that are in the video, earlier processes' too, which their log tells.

        Raises:
            UserInputError: that log cannot be read any more.
        """
        encode_ms = self._ledger.encode_ms
        made = [chunk.encoded(encode_ms[index]) for index, chunk in self._chunks.items()]
        if self._resumed is None:
            return made
        return [*earlier_chunks(self._resumed.log, self._resumed.progress), *made]

    def forget(self) -> None:
        """Nobody will resume this stream: first goes what makes a process do so."""
        SnapshotStore(self.files.snapshot).clear()
        self.files.hidden_log.unlink(missing_ok=True)

    def interrupt(self) -> None:
        """Leave what is whole to a process that resumes."""
        with suppress(RecordingError):  # the person's signal is the one to tell
            self.writer.suspend()
        if not self.writer.durable_chunks:
            self.forget()

    def abort(self) -> None:
        """Leave nothing."""
        self.forget()
        self.writer.abort()
