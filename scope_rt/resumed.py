"""What an earlier process left of a stream: where it is resumed, by its snapshot and its log."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scope_contracts.errors import ContractError, IntegrityError, UserInputError
from scope_contracts.retraction import Retraction
from scope_rt.control.log_entries import recorded_start_frame
from scope_rt.control.point_check import difference, unlogged
from scope_rt.control.resume_point import ResumePoint
from scope_rt.control.start_frame import StartFrame
from scope_rt.control.unverified import Unverified
from scope_rt.instruments import Instruments
from scope_rt.logged_control import LoggedControl
from scope_rt.record.log_index import LogIndex
from scope_rt.record.progress import StreamProgress
from scope_rt.record.runs import Runs
from scope_rt.record.snapshot import SnapshotStore
from scope_rt.record.snapshot_header import check_identity
from scope_rt.stream_identity import check_same_picture, identity
from scope_rt.stream_setup import StreamSetup
from scope_rt.tensors import sha256_of


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedAt:
    """The chunk at which a command took effect before its stream was resumed, or at which it does
    so again: whoever was not told must not post it a second time."""

    chunk_index: int
    cache_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The stream that an earlier process left: its log and where it is resumed."""

    log: Path
    progress: StreamProgress
    point: ResumePoint
    log_offset: int
    is_cut: bool
    """Whether `point` is not saved as it is: what the log told of it, the log will tell no more,
    or leads further."""
    is_unlogged: bool = False
    """Whether the log lacks the newest pending chunk of `point`."""
    unsaid: Retraction | None = None
    """What rank0 was lost before it could retract."""
    start_frame: StartFrame | None = None
    """What chunk 0 is, of a stream that began with a picture and makes it again."""
    applied: Mapping[str, AppliedAt] = field(default_factory=dict)
    """Where commands with an id took effect, or do so again."""

    @property
    def shown(self) -> Runs:
        """The chunks before the resume point that its consumer was given, with their epochs."""
        return self.progress.shown.newest(self.point.num_acknowledged + len(self.point.pending))


class EarlierStream:
    """The stream of a snapshot folder, read to be resumed; nothing is changed."""

    def __init__(self, setup: StreamSetup, store: SnapshotStore, instruments: Instruments) -> None:
        self._setup, self._store, self._instruments = setup, store, instruments
        self._config = setup.config.recovery

    def found(self) -> Resumed | None:
        """Where it is resumed; None where nothing was saved.

        Raises:
            UserInputError: it cannot be read, is of another stream, or snapshot and log differ.
        """
        loaded = self._store.load(ResumePoint)
        if loaded is None:
            return None
        header, point = loaded
        folder = self._store.folder
        path = self._log_to_resume(Path(header.log))
        log = LogIndex(path)  # first: a log of another version means something else by its names
        progress = log.progress
        check_identity(header, identity(self._setup), folder=folder)
        self._check_latents(point, folder)
        if not progress.num_starts:
            raise UserInputError(
                f"the log {path} of the stream to resume is gone; to start anew, delete {folder}"
            )
        check_same_picture(self._setup, progress.start_frame, folder=folder)
        if self._setup.verifies and (differs := difference(point, log)):
            raise UserInputError(
                f"the snapshot {folder} is not of the stream in {path} ({differs}); to start anew, "
                f"delete {folder} and {path}"
            )
        control = LoggedControl(setup=self._setup, instruments=self._instruments, log=path)
        point = point.with_schedule(
            control.directive_of(each)
            for each in progress.scheduled
            if each.chunk_index >= point.first_scheduled
        )
        missing = unlogged(point, progress)
        if missing is not None:
            progress.add_shown(missing.envelope.chunk_index, missing.envelope.cache_epoch)
        point, unsaid = self._cut(point, progress, header.log_offset)
        is_cut = point.is_cut
        if is_cut:
            point = self._after_cut(point, log, control)
        applied = _applied(point, log, is_cut=is_cut)
        progress.forget(point.counts.next_chunk_index)
        return Resumed(
            log=path,
            progress=progress,
            point=point,
            log_offset=header.log_offset,
            is_cut=is_cut,
            is_unlogged=missing is not None and missing in point.pending,
            unsaid=unsaid,
            start_frame=None if point.counts.next_chunk_index else start_frame_in(log),
            applied=applied,
        )

    def _cut(
        self, point: ResumePoint, progress: StreamProgress, log_offset: int
    ) -> tuple[ResumePoint, Retraction | None]:
        """The point without what a process retracted after byte `log_offset`, and was killed before
        it saved that; and what none has retracted, which is in `progress` then."""
        next_chunk = point.counts.next_chunk_index
        cut_at = progress.first_suspect(next_chunk=next_chunk, log_offset=log_offset)
        unsaid = None
        if self._setup.environment.wrong_is_unsaid and not progress.has_retracted:
            first = progress.first_made
            unsaid = _retraction_from(first, progress.shown)
            progress.retractions += [] if unsaid is None else [unsaid]
            cut_at = first if cut_at is None else min(first, cut_at)
        if cut_at is None:
            return point, unsaid
        num_shown = len(progress.shown.between(cut_at, next_chunk))
        return point.cut_before(cut_at, num_shown=num_shown, epoch=progress.last_epoch), unsaid

    def _after_cut(self, point: ResumePoint, log: LogIndex, control: LoggedControl) -> ResumePoint:
        """The point with what the log says was in effect at its cut, and asked for from there on.

        Raises:
            UserInputError: a prompt has other embeddings than it had.
        """
        first, conditioning = point.counts.next_chunk_index, None
        prompt = log.newest_prompt(before=first)
        if prompt is not None:
            conditioning = control.directive_of(prompt).directive.conditioning
        again = [control.directive_of(each) for each in log.controls_from(first)]
        seed, bias = log.newest_values(before=first)
        return point.after_cut(conditioning, again, base_seed=seed, kv_cache_attention_bias=bias)

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


def start_frame_in(log: LogIndex) -> StartFrame | None:
    """What the stream of a log began with; None for one that began with noise.

    Raises:
        UserInputError: it is damaged.
    """
    record = log.progress.start_frame
    if record is None:
        return None
    try:
        frame = recorded_start_frame(record, log.start_latents())
        if sha256_of(frame.latents) == frame.latents_sha256:
            return frame
        why = "its latents changed before they were written"
    except ContractError as error:
        why = str(error)
    raise UserInputError(
        f"stream log {log.path}: the start frame is damaged ({why}); to start the stream anew, "
        f"delete {log.path}"
    )


def _applied(point: ResumePoint, log: LogIndex, *, is_cut: bool) -> dict[str, AppliedAt]:
    """Of commands whose chunks are saved, and of those that the point plans again."""
    counts, epochs = point.counts, log.progress.planned
    end = counts.next_chunk_index
    chunks = {name: index for name, index in log.commands.items() if index < end}
    for again in point.asked_again:
        chunks |= dict.fromkeys(again.directive.command_ids, again.chunk_index)

    def epoch_of(index: int) -> int:
        epoch = epochs.number_of(index)
        if epoch is not None and (index < end or not is_cut):
            return epoch
        return counts.cache_epoch + is_cut

    return {
        name: AppliedAt(chunk_index=index, cache_epoch=epoch_of(index))
        for name, index in chunks.items()
    }


def _retraction_from(first: int, shown: Runs) -> Retraction | None:
    """Of all chunks from there on: what was found, and how old it may be, was told to nobody."""
    reason = "a rank ended by an error of integrity, and rank0 was lost before it said which"
    return Unverified(1, next_chunk=shown.last[0] + 1, shown=shown).retract(first, reason)
