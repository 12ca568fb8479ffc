"""Where rank0 writes what a restart needs, and what it continues: its log and its snapshot."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path

import torch

from scope_contracts.errors import UserInputError
from scope_contracts.log_records import Begun, Record
from scope_rt.control.chunk import Arrived
from scope_rt.control.log_entries import finished_record, retracted_record, start_frame_record
from scope_rt.control.resume_point import ResumePoint, ResumePoints
from scope_rt.control.saved_points import SavedResumePoints
from scope_rt.control.start_frame import StartFrame
from scope_rt.instruments import Instruments
from scope_rt.launch_environment import LaunchEnvironment
from scope_rt.record.log import Log, NullLog
from scope_rt.record.log_index import LogIndex
from scope_rt.record.progress import StreamProgress
from scope_rt.record.reader import read_progress
from scope_rt.record.runs import Runs
from scope_rt.record.snapshot import SnapshotStore
from scope_rt.record.stream_log import StreamLog
from scope_rt.resumed import EarlierStream, Resumed, start_frame_in
from scope_rt.rewound import RewoundStream
from scope_rt.stream_identity import identity, is_same_picture, opened
from scope_rt.stream_setup import StreamSetup
from scope_rt.tensors import bytes_of
from scope_rt.vae.codec import num_frames


class Recovery:
    """Rank0's log and snapshot of one session; a `Log` itself, which writes nothing before it is
    opened."""

    def __init__(
        self,
        setup: StreamSetup,
        *,
        run_id: str,
        instruments: Instruments,
        check_replaced: Callable[[], None] | None = None,
        rewind_to: int | None = None,
    ) -> None:
        """Read what there is to resume; with `rewind_to`, the stream of the log before that chunk.

        `check_replaced` refuses to lose what is there and is not resumed; called once a new log is
        locked. By default nothing may be lost, but with `resume=False` in the configuration.

        Raises:
            UserInputError: it cannot be read, or is of another stream; it is left as it was.
        """
        self._setup, self._run_id, self._instruments = setup, run_id, instruments
        config = setup.config.recovery
        self._config = config
        self._store = None if config.snapshot is None else SnapshotStore(config.snapshot)
        self.resumed: Resumed | None = None
        if self._store is None and rewind_to is not None:
            raise UserInputError(
                "a stream is rewound where it keeps a log and a snapshot; give both"
            )
        if self._store is not None:
            with self._watched("reading what an earlier stream left"):
                if rewind_to is not None:
                    self.resumed = self._rewound(rewind_to)
                elif self._is_to_be_resumed(self._store):
                    self.resumed = EarlierStream(setup, self._store, instruments).found()
        own_check = _allow if config.resume is False else self._check_nothing_is_lost
        self._check_replaced = check_replaced or own_check
        self._log: Log = NullLog()

    @property
    def offset(self) -> int:
        """Bytes of whole records in the log."""
        return self._log.offset

    @property
    def failure(self) -> str | None:
        """Why the log ended early, in one sentence."""
        return self._log.failure

    @property
    def latents_failure(self) -> str | None:
        """Why latents are no longer kept, in one sentence."""
        return self._log.latents_failure

    def append(self, record: Record, blob: bytes = b"") -> None:
        """Add a record; nothing where no log is kept."""
        self._log.append(record, blob)

    def write_soon(self) -> None:
        """As `StreamLog.write_soon`."""
        self._log.write_soon()

    def when_written(self, call: Callable[[int], None]) -> Callable[[], None]:
        """As `StreamLog.when_written`."""
        return self._log.when_written(call)

    def settle_check(self) -> None:
        """Return when what the log to resume held was read in full; blocks as its `offset` does.

        Raises:
            DamageError: it is damaged.
        """
        if isinstance(self._log, StreamLog):
            self._log.settle_check()

    def close(self) -> None:
        """Let go of the log's file, and of the snapshot. Idempotent."""
        self._log.close()
        if self._store is not None:
            self._store.close()

    @property
    def resume_point(self) -> ResumePoint | None:
        """Where the stream is resumed; None for a new one."""
        return None if self.resumed is None else self.resumed.point

    @property
    def shown_before(self) -> Runs:
        """The chunks that earlier processes showed of this stream, with their epochs."""
        return Runs() if self.resumed is None else self.resumed.shown

    @cached_property
    def resume_points(self) -> ResumePoints | None:
        """Where the newest resume point is kept; None where nothing is."""
        if self._store is None or self._config.log is None:
            return None
        return SavedResumePoints(
            store=self._store,
            log=self._log_path,
            run_id=self._run_id,
            identity=identity(self._setup),
        )

    @property
    def records_latents(self) -> bool:
        """Whether this session's chunks are logged with their latents: a resumed log continues as
        it began."""
        held_before = self.resumed is not None and self.resumed.progress.holds_latents
        return self._config.record_latents or held_before

    @cached_property
    def start_frame(self) -> StartFrame:
        """What chunk 0 is, of a stream that begins with a picture: what this run began it with.

        Raises:
            UserInputError: the picture is needed and cannot be read, or the log is damaged.
            IntegrityError: as `StreamSetup.start_frame`.
        """
        if self.resumed is not None:
            assert self.resumed.start_frame is not None, "it was compared with what was asked for"
            return self.resumed.start_frame
        return self._of_this_run() or self._setup.start_frame

    def _of_this_run(self) -> StartFrame | None:
        """What the last start of this run noted before it was lost, and had shown nothing."""
        if self._config.log is None or self._config.resume is False:
            return None
        if not self._setup.environment.attempt:
            return None
        log = LogIndex(self._config.log)
        noted = log.progress.start_frame
        if noted is None or not self._is_of_this_run(log.progress):
            return None
        return start_frame_in(log) if is_same_picture(self._setup, noted) else None

    def _is_of_this_run(self, progress: StreamProgress) -> bool:
        return progress.run_id == self._run_id != ""

    def open_log(self) -> None:
        """Begin the log anew, or continue that of the stream to resume; then say who opened it.

        Raises:
            UserInputError: the file cannot be written or resumed, another process writes it, or an
                earlier stream would be lost.
            SnapshotError: an earlier snapshot cannot be removed, or a cut cannot be saved.
        """
        if self._config.log is None:
            return
        resumed = self.resumed
        with self._watched("opening the stream log"):
            self._log = StreamLog(
                self._log_path,
                record_latents=self.records_latents,
                resume=resumed is not None,
                at_least=0 if resumed is None else resumed.log_offset,
                check=self._check_replaced if resumed is None else _allow,
                faults=self._instruments.faults,
            )
        if resumed is None and self._store is not None:
            self._store.clear()  # not before: what is refused leaves it as it was
        if resumed is not None and resumed.unsaid is not None:
            # Before the cut is saved: whoever is killed in between finds it, and cuts there again.
            self._log.append(retracted_record(resumed.unsaid))
            if self._log.failure is not None:
                raise UserInputError(self._log.failure)
        if resumed is not None and resumed.is_cut and self.resume_points is not None:
            self.resume_points.begin(resumed.point, log=self._log)()
        next_chunk = None if resumed is None else resumed.point.counts.next_chunk_index
        broken = self._instruments.broken_on_purpose
        self._log.append(
            opened(
                self._setup,
                run_id=self._run_id,
                resumed_at_chunk=next_chunk,
                broken_on_purpose=broken,
            )
        )
        if resumed is not None and resumed.is_unlogged:
            self._log_pending(resumed.point.arrived()[-1])

    def _log_pending(self, arrived: Arrived) -> None:
        """The `Finished` record of a chunk that the log of an earlier process lacks."""
        is_first, num_latents = arrived.envelope.init_cache, arrived.latents.shape[1]
        length = num_frames(self._setup.codec_sizes, num_latents, starts_epoch=is_first)
        chunk = arrived.shown(torch.empty(1, length, 0, 0, 3), stage_ms={}, crc32=None)
        record = finished_record(chunk, with_latents=self.records_latents)
        self._log.append(record, bytes(bytes_of(chunk.latents)) if self.records_latents else b"")

    def begin(self, prompt: str) -> None:
        """A stream begins with `prompt`: what an earlier one left is replaced.

        Raises:
            UserInputError, SnapshotError: as `open_log`.
        """
        if isinstance(self._log, NullLog):
            self.open_log()
        elif self._store is not None:
            self._store.clear()
        self._log.append(Begun(at_s=time.time(), prompt=prompt))

    def append_start_frame(self) -> None:
        """Before the first resume point is saved: whoever resumes the stream needs no picture."""
        frame = self.start_frame
        self._log.append(start_frame_record(frame), bytes(bytes_of(frame.latents)))

    def _watched(self, what: str) -> AbstractContextManager[None]:
        """A disk may take any time to read a long log, or never answer."""
        return self._instruments.watchdog.section(what, is_bounded=False, ends_with_group=True)

    def _check_nothing_is_lost(self) -> None:
        """Refuse to replace a stream that is there.

        A refusal must hold however often the ranks are started again: some launchers do so after
        any error."""
        store, log = self._store, self._log_path
        header = None if store is None else store.header()
        if store is not None and header is not None and header.next_chunk_index > 0:
            raise UserInputError(
                f"the snapshot {store.folder} is of a stream of {header.next_chunk_index} chunks; "
                f"resume=True continues it; to start anew, delete {store.folder} and {header.log}, "
                "or give resume=False"
            )
        # A resume point is saved before the first chunk of a stream: a crash leaves chunks without
        # one only of a stream before, which this run makes again too.
        progress = read_progress(log)
        num_chunks = len(progress.shown)
        is_of_stream_before = progress.shown.last[0] < progress.begun_at
        if num_chunks and not (is_of_stream_before and self._is_of_this_run(progress)):
            raise UserInputError(
                f"stream log {log}: is there already, of a stream of {num_chunks} chunks without a "
                "snapshot to resume it from; choose another file, or to replace it, delete it or "
                "give resume=False"
            )

    @property
    def _log_path(self) -> Path:
        assert self._config.log is not None
        return self._config.log if self.resumed is None else self.resumed.log

    def _rewound(self, chunk_index: int) -> Resumed:
        log = self._config.log
        assert log is not None, "who keeps a snapshot keeps a log"
        return RewoundStream(self._setup, log, self._instruments).before(chunk_index)

    def _is_to_be_resumed(self, store: SnapshotStore) -> bool:
        """An earlier stream may have left a snapshot that nobody asked for: the count of starts
        alone says nothing, where the snapshot tells who saved it."""
        resume, environment = self._config.resume, self._setup.environment
        if resume is not None:
            return resume
        if not _knows_its_run(environment):
            return environment.attempt > 0
        header = store.header() if self._run_id else None
        return header is not None and header.run_id == self._run_id


def _allow() -> None: ...


def _knows_its_run(environment: LaunchEnvironment) -> bool:
    """By the name it was given, or by one that its ranks find in the launcher's store."""
    finds_name = environment.world_size > 1 and environment.store_is_hosted
    return finds_name or environment.run_id is not None
