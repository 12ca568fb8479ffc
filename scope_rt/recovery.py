"""What an earlier process left of a stream, and where this one writes: its log and its snapshot."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from scope_contracts.errors import IntegrityError, UserInputError
from scope_contracts.log_records import Begun, Control, Record, Scheduled
from scope_contracts.retraction import Retraction
from scope_rt.control.inbox import Directive, ScheduledDirective
from scope_rt.control.log_entries import recorded_transition, retracted_record
from scope_rt.control.point_check import difference
from scope_rt.control.resume_point import ResumePoint, ResumePoints
from scope_rt.control.unverified import Unverified
from scope_rt.instruments import Instruments
from scope_rt.launch_environment import LaunchEnvironment
from scope_rt.record.log_index import LogIndex
from scope_rt.record.progress import StreamProgress
from scope_rt.record.reader import read_progress
from scope_rt.record.runs import Runs
from scope_rt.record.snapshot import SnapshotHeader, SnapshotStore, check_identity
from scope_rt.record.stream_log import Log, NullLog, StreamLog
from scope_rt.stream_identity import identity, opened
from scope_rt.stream_setup import StreamSetup
from scope_rt.tensors import sha256_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The stream that an earlier process left: its log and where it is resumed."""

    log: Path
    progress: StreamProgress
    point: ResumePoint
    log_offset: int
    is_cut: bool
    """Whether `point` is not saved as it is: what the log told of it, the log will tell no more."""
    unsaid: Retraction | None = None
    """What rank0 was lost before it could retract."""

    @property
    def shown(self) -> Runs:
        """The chunks before the resume point that its consumer was given, with their epochs."""
        return self.progress.shown.newest(self.point.num_acknowledged + len(self.point.pending))


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
    ) -> None:
        """Read what there is to resume.

        `check_replaced` refuses to lose what is there and is not resumed; called once a new log is
        locked. By default nothing may be lost, but with `resume=False` in the configuration.

        Raises:
            UserInputError: it cannot be read, or is of another stream; it is left as it was.
        """
        self._setup, self._run_id, self._instruments = setup, run_id, instruments
        config = setup.config.recovery
        self._config = config
        self._store = None if config.snapshot is None else SnapshotStore(config.snapshot)
        self.resumed = self._found() if self._store is not None else None
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

    def when_written(self, call: Callable[[int], None]) -> None:
        """As `StreamLog.when_written`."""
        self._log.when_written(call)

    def settle_check(self) -> None:
        """Return when what the log to resume held was read in full; blocks as its `offset` does.

        Raises:
            DamageError: it is damaged.
        """
        if isinstance(self._log, StreamLog):
            self._log.settle_check()

    def close(self) -> None:
        """Let go of the log's file. Idempotent."""
        self._log.close()

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
            newest=-1 if self.resumed is None else self.resumed.point.counts.next_chunk_index,
        )

    @property
    def records_latents(self) -> bool:
        """Whether this session's chunks are logged with their latents: a resumed log continues as
        it began."""
        held_before = self.resumed is not None and self.resumed.progress.holds_latents
        return self._config.record_latents or held_before

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
            self.resume_points.save(resumed.point, log=self._log)
        next_chunk = None if resumed is None else resumed.point.counts.next_chunk_index
        broken = self._instruments.broken_on_purpose
        self._log.append(opened(self._setup, resumed_at_chunk=next_chunk, broken_on_purpose=broken))

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

    def _check_nothing_is_lost(self) -> None:
        """Refuse to replace a stream that is there, unless this run's last start left it."""
        store, log = self._store, self._log_path
        header = None if store is None else store.header()
        if store is not None and header is not None and header.next_chunk_index > 0:
            raise UserInputError(
                f"the snapshot {store.folder} is of a stream of {header.next_chunk_index} chunks; "
                f"resume=True continues it; to start anew, delete {store.folder} and {header.log}, "
                "or give resume=False"
            )
        if self._setup.environment.attempt or (store is not None and self._config.resume):
            return
        # A crash may come between the first chunk and its snapshot: that is no stream to keep.
        num_chunks = len(read_progress(log).shown)
        if num_chunks > (0 if store is None else 1):
            raise UserInputError(
                f"stream log {log}: is there already, of a stream of {num_chunks} chunks without a "
                "snapshot to resume it from; choose another file, or to replace it, delete it or "
                "give resume=False"
            )

    @property
    def _log_path(self) -> Path:
        assert self._config.log is not None
        return self._config.log if self.resumed is None else self.resumed.log

    def _found(self) -> Resumed | None:
        assert self._store is not None
        if not self._is_to_be_resumed(self._store):
            return None
        loaded = self._store.load(ResumePoint)
        if loaded is None:
            return None
        header, point = loaded
        folder = self._store.folder
        check_identity(header, identity(self._setup), folder=folder)
        self._check_latents(point, folder)
        path = self._log_to_resume(Path(header.log))
        log = LogIndex(path)
        progress = log.progress
        if not progress.num_starts:
            raise UserInputError(
                f"the log {path} of the stream to resume is gone; to start anew, delete {folder}"
            )
        if self._setup.verifies and (differs := difference(point, log)):
            raise UserInputError(
                f"the snapshot {folder} is not of the stream in {path} ({differs}); to start anew, "
                f"delete {folder} and {path}"
            )
        point = point.with_schedule(
            self._directive_of(each, path)
            for each in progress.scheduled
            if each.chunk_index >= point.first_scheduled
        )
        # A process that was killed before it saved where the stream continues without them.
        next_chunk = point.counts.next_chunk_index
        cut_at = progress.first_suspect(next_chunk=next_chunk, log_offset=header.log_offset)
        unsaid = None
        if self._setup.environment.wrong_is_unsaid and not progress.has_retracted:
            first = progress.first_made
            unsaid = _retraction_from(first, progress.shown)
            progress.retractions += [] if unsaid is None else [unsaid]
            cut_at = first if cut_at is None else min(first, cut_at)
        if cut_at is not None:
            num_shown = len(progress.shown.between(cut_at, next_chunk))
            point = point.cut_before(cut_at, num_shown=num_shown, epoch=progress.last_epoch)
        is_cut = point.is_cut
        if is_cut:
            point = self._after_cut(point, log)
        progress.forget(point.counts.next_chunk_index)
        return Resumed(
            log=path,
            progress=progress,
            point=point,
            log_offset=header.log_offset,
            is_cut=is_cut,
            unsaid=unsaid,
        )

    def _after_cut(self, point: ResumePoint, log: LogIndex) -> ResumePoint:
        """The point with what the log says was in effect at its cut, and asked for from there on.

        Raises:
            UserInputError: a prompt has other embeddings than it had.
        """
        first, conditioning = point.counts.next_chunk_index, None
        prompt = log.newest_prompt(before=first)
        if prompt is not None:
            conditioning = self._directive_of(prompt, log.path).directive.conditioning
        again = [self._directive_of(each, log.path) for each in log.controls_from(first)]
        return point.after_cut(conditioning, again)

    def _check_latents(self, point: ResumePoint, folder: Path) -> None:
        """Refuse latents that changed in memory before they were saved."""
        if not self._setup.verifies:
            return
        for kept in point.tail.chunks:
            where, now = f"latent frame {kept.start_frame}", sha256_of(kept.latents)
            try:
                self._instruments.checks.kept(where, "latents", now=now, noted=kept.latents_sha256)
            except IntegrityError as error:
                raise UserInputError(
                    f"the snapshot {folder} has latents that were damaged before they were saved "
                    f"({error}); to start anew, delete {folder}"
                ) from error

    def _directive_of(self, event: Scheduled | Control, log: Path) -> ScheduledDirective:
        """What a record asks for: of the schedule, or of what took effect."""
        prompt = event.prompt
        if isinstance(event, Control) and not event.embeds_sha256:
            prompt = None
        text = None if prompt is None else self._setup.conditioning(prompt, self._instruments)
        if isinstance(event, Control) and text and text.embeds_sha256 != event.embeds_sha256:
            raise UserInputError(
                f"the prompt of chunk {event.chunk_index} has other embeddings than when its "
                f"chunks were made, so that the stream cannot be resumed there; to start "
                f"anew, delete {self._config.snapshot} and {log}"
            )
        directive = Directive(
            conditioning=text,
            transition=recorded_transition(event),
            hard_cut=event.hard_cut,
            drop_in_flight=isinstance(event, Control) and event.drop_in_flight,
            recompute=event.recompute,
        )
        return ScheduledDirective(chunk_index=event.chunk_index, directive=directive)

    def _log_to_resume(self, saved: Path) -> Path:
        """The log that the snapshot names, or the one that is given where both were moved."""
        given = self._config.log
        if given is None or not given.exists():
            return saved
        if saved.exists() and not saved.samefile(given):
            raise UserInputError(
                f"the stream to resume keeps its log in {saved}, not in {given}; give that one, "
                "or start a new stream"
            )
        return given

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


def _retraction_from(first: int, shown: Runs) -> Retraction | None:
    """Of all chunks from there on: what was found, and how old it may be, was told to nobody."""
    reason = "a rank ended by an error of integrity, and rank0 was lost before it said which"
    return Unverified(1, next_chunk=shown.last[0] + 1, shown=shown).retract(first, reason)


def _knows_its_run(environment: LaunchEnvironment) -> bool:
    is_named = environment.store_is_hosted or environment.run_id is not None
    return environment.world_size > 1 and is_named


@dataclass(slots=True, kw_only=True)
class SavedResumePoints:
    """Resume points in a snapshot folder; `newest` is where the last one that was saved leads."""

    store: SnapshotStore
    log: Path
    run_id: str
    identity: tuple[tuple[str, str], ...]
    newest: int = -1

    def save(self, point: ResumePoint, *, log: Log) -> None:
        """As `ResumePoints.save`."""
        header = SnapshotHeader(
            run_id=self.run_id,
            identity=self.identity,
            log=str(self.log.absolute()),
            log_offset=0,
            next_chunk_index=point.counts.next_chunk_index,
        )
        kept = replace(point, later=())  # the log has it, once
        if log.failure is None:
            self.store.save(header, kept, log=log)
        elif header.next_chunk_index <= self.newest:
            self.store.save(replace(header, log_offset=log.offset), kept)
        if log.failure is None:
            self.newest = header.next_chunk_index
