"""Rank0's side of `scope-rt stream`: every chunk is shown once, and what is left is whole files.

How a stream stands when it begins is one value (`Standing`); how it ends is decided in one place
(`_conclude`). A stream that somebody may go on with leaves its chunks, journal and checkpoint.
"""

import signal
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from scope_contracts.errors import RecordingError, ScopeError, UserInputError
from scope_rt.control.chunk import Chunk
from scope_rt.disk import remedy
from scope_rt.launch_environment import LaunchEnvironment
from scope_rt.record.snapshot_store import SnapshotStore, look
from scope_rt.session import StreamSession
from scope_rt.trace import Span, write_chrome_trace
from scope_rt.video.segments import num_held_chunks
from scope_rt.video.writer import VideoWriter
from scope_runners import journal
from scope_runners.exit_codes import FAILED
from scope_runners.job import OutputFiles, StreamJob
from scope_runners.journal import Entry, Journal, Told
from scope_runners.launcher import Progress
from scope_runners.leftovers import check_nothing_is_lost, is_finished, say_how_to_resume
from scope_runners.progress import progress_bar
from scope_runners.stop_request import StopRequest, taking_stop_signals
from scope_runners.storyboard import Storyboard
from scope_runners.summary import ChunkRecord, Ending, Moments, StreamSummary, summarise, table
from scope_runners.wording import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What there is of a stream when this process takes it up."""

    goes_on: bool
    """Whether a checkpoint was found."""
    is_published: bool
    """Whether an earlier process was ended between the joined video and its own end."""
    kept: tuple[Entry, ...]
    """The chunks that were shown before, and stay."""
    num_starts: int
    """Processes that took it up before this one."""

    @classmethod
    def of(cls, told: Told | None, *, held_chunks: int, is_finished: bool) -> Self:
        """`told` is the journal of a stream to go on with; the writer holds `held_chunks`.

        A chunk that was told and is not held is made again, unless all are in a finished video.

        Raises:
            UserInputError: the journal lost chunks that the writer holds.
        """
        if told is None:
            return cls(goes_on=False, is_published=False, kept=(), num_starts=0)
        if len(told.entries) < held_chunks:
            raise UserInputError(
                f"the video to resume holds {counted(held_chunks, 'chunk')} and its journal tells "
                f"of {len(told.entries)}; delete the journal, if it is there, and run without "
                "--resume to start anew"
            )
        return cls(
            goes_on=True,
            is_published=is_finished,
            kept=told.entries if is_finished else told.entries[:held_chunks],
            num_starts=max(1, told.num_starts),
        )


class _Stage:
    """Where chunks are shown: the video, the storyboard and the journal of it all."""

    def __init__(self, job: StreamJob, session: StreamSession) -> None:
        files = self.files = job.files
        goes_on = session.resumed_at_chunk is not None
        check_nothing_is_lost(job, resumes=goes_on)
        told = journal.read(files.journal) if goes_on else None
        is_whole = told is not None and is_finished(told, files)
        way_out = f"start anew: delete {files.journal}, then leave --resume out"
        num_there = num_held_chunks(files.video)
        if num_there < session.num_acknowledged_before and not is_whole:
            raise UserInputError(
                f"{files.video}: the resume point is after "
                f"{counted(session.num_acknowledged_before, 'chunk')}, and {num_there} are there; "
                f"{way_out}"
            )
        try:
            self.writer = VideoWriter(
                files.video,
                width=job.setup.width,
                height=job.setup.height,
                fps=job.setup.recipe.fps,
                trace=session.trace,
                resume=goes_on and not is_whole,
                keep_on_error=True,
            )
        except UserInputError as error:
            if not goes_on:
                raise
            raise UserInputError(f"{error}; {way_out}") from error
        with ExitStack() as on_error:
            on_error.callback(self.writer.suspend)
            held_chunks = self.writer.held_chunks
            self.standing = Standing.of(told, held_chunks=held_chunks, is_finished=is_whole)
            self._journal = Journal(
                files.journal,
                job.request,
                self.standing.kept,
                self.standing.num_starts,
                is_published=self.standing.is_published,
            )
            on_error.pop_all()
        self.storyboard = Storyboard(job.timeline, fps=job.setup.recipe.fps)
        self.chunks: list[ChunkRecord] = []
        self.first_frame_s: float | None = None
        for chunk, picture in self.standing.kept:
            self.storyboard.add(chunk, picture)
            self.chunks.append(chunk.ordered())
        self._num_before = len(self.chunks)

    def show(self, chunk: Chunk) -> None:
        """Tell of a chunk and write it."""
        if self.first_frame_s is None:
            self.first_frame_s = time.perf_counter()
        record, picture = ChunkRecord.of(chunk), None
        if self.storyboard.keeps(chunk.chunk_index):
            picture = chunk.frames[len(chunk.frames) // 2]
        self.storyboard.add(record, picture)
        self._journal.add(record, picture)
        self.chunks.append(record)
        self.writer.write(chunk.frames)

    def encoded(self) -> list[ChunkRecord]:
        """All chunks, with what writing took where this process wrote them."""
        made = zip(self.chunks[self._num_before :], self.writer.encode_ms, strict=True)
        return [*self.chunks[: self._num_before], *(chunk.encoded(ms) for chunk, ms in made)]

    def publish(self, *, keep: bool) -> None:
        """Put the video under its name; `keep` leaves the chunks for a process that goes on."""
        self.writer.drain()
        if not keep:
            self._journal.publish()
        self.writer.close(keep=keep)

    def forget(self) -> None:
        """Nobody will go on with this stream: first goes what makes a process do so."""
        SnapshotStore(self.files.snapshot).clear()
        self.files.hidden_log.unlink(missing_ok=True)
        self._journal.remove()

    def leave(self) -> None:
        """Somebody may go on with it."""
        self._journal.close()

    def interrupt(self) -> None:
        """Leave what is whole to a process that goes on."""
        with suppress(RecordingError):  # the person's signal is the one to tell
            self.writer.suspend()
        self.leave() if self.writer.durable_chunks else self.forget()

    def abort(self) -> None:
        """Leave nothing."""
        self.forget()
        self.writer.abort()


@dataclass(slots=True, kw_only=True)
class _Run:
    """All that a stream has while rank0 shows it; moments in seconds."""

    job: StreamJob
    session: StreamSession
    stage: _Stage
    stop: StopRequest
    progress: Progress
    started_s: float
    ready_s: float

    @property
    def environment(self) -> LaunchEnvironment:
        return self.job.setup.environment

    @property
    def will_go_on(self) -> bool:
        """Whether the ranks are started again although this one was told to stop.

        torchrun ends its ranks by SIGTERM also when another host is lost.
        """
        is_told = self.stop.signum == signal.SIGTERM
        return is_told and bool(self.environment.run_id) and self.environment.may_restart

    def will_start_again(self) -> bool:
        """Whether the launcher starts the ranks again if this process fails now."""
        environment = self.environment
        if self.stop.signum is not None:
            return self.will_go_on
        restarts = environment.restarts_after_progress
        return environment.may_restart or (restarts and self.progress.has_risen())


def control(job: StreamJob, session: StreamSession, *, started_s: float) -> int:
    """Make the video; a stream that is cut short leaves a shorter one. Returns the exit code.

    Where the ranks will be started again after a failure, all is left as it is for them.
    """
    ready_s = time.perf_counter()
    stop = StopRequest()
    with taking_stop_signals(stop.take), ExitStack() as at_end:
        at_end.push(session)
        stage = _Stage(job, session)
        at_end.pop_all()  # from here on the session is ended where it is used
        _say_how_it_begins(job, session, stage.standing)
        run = _Run(
            job=job,
            session=session,
            stage=stage,
            stop=stop,
            progress=Progress(lambda: _num_chunks_saved(job.files.snapshot)),
            started_s=started_s,
            ready_s=ready_s,
        )
        at_end.callback(stage.leave)
        with stage.writer:
            try:
                failure, spans = _play(run)
                if failure is not None and not stage.chunks:
                    stage.leave() if stage.standing.goes_on else stage.abort()
                    raise failure
                return _conclude(run, failure, spans)
            except KeyboardInterrupt:
                stage.interrupt()
                _say("interrupted")
                if (
                    not job.setup.environment.launched
                ):  # else the launcher says it, whatever became of rank0
                    say_how_to_resume(job)
                return 128 + (stop.signum or signal.SIGINT)


def _play(run: _Run) -> tuple[ScopeError | None, tuple[Span, ...]]:
    """Show all that is left; a failure that no restart follows is returned."""
    try:
        with ExitStack() as on_error:
            on_error.push(run.session)
            if not run.stage.standing.is_published:
                _show_all(run)
            on_error.pop_all()
        return None, run.session.close()
    except RecordingError:
        raise
    except ScopeError as error:
        if run.will_start_again():
            raise
        return error, ()


def _show_all(run: _Run) -> None:
    """Show every chunk, until the end or the first one after a stop request."""
    timeline, request = run.job.timeline, run.job.request
    chunks = run.session.stream(
        request.prompt,
        num_chunks=timeline.num_chunks,
        schedule=(*timeline.events, *timeline.later),
        acknowledged=lambda: run.stage.writer.durable_chunks,
    )
    num_frames = timeline.num_chunks * timeline.frames_per_chunk
    with progress_bar(num_frames, enabled=not request.json) as bar:
        for chunk in chunks:
            run.stage.show(chunk)
            bar(chunk)
            if run.stop.signum is not None:
                return


def _conclude(run: _Run, failure: ScopeError | None, spans: tuple[Span, ...]) -> int:
    """Publish what was made and say so; raises `failure` once that is done."""
    job, stage, stop = run.job, run.stage, run.stop
    complete = len(stage.chunks) >= job.timeline.num_chunks
    keep = not complete and (failure is not None or run.will_go_on)
    stage.publish(keep=keep)
    cut_short = Ending.COMPLETE if complete else Ending.INTERRUPTED
    summary = summarise(
        job,
        stage.encoded(),
        ending=Ending.FAILED if failure is not None else cut_short,
        moments=Moments(
            started_s=run.started_s,
            ready_s=run.ready_s,
            first_frame_s=stage.first_frame_s or time.perf_counter(),
            written_s=time.perf_counter(),
            num_frames=stage.writer.num_frames,
        ),
        cache_spec=job.setup.cache_spec,
        blocked_s=stage.writer.blocked_s,
        restarts=max(run.environment.attempt, stage.standing.num_starts),
        recording_failure=run.session.log.failure,
        files=stage.files,
    )
    _publish(summary, stage.files, stage.storyboard, spans)
    stage.leave() if keep else stage.forget()
    _report(summary, as_json=job.request.json, may_go_on=keep)
    if failure is not None:
        raise failure
    if complete:
        return 0
    return FAILED if stop.signum is None else 128 + stop.signum


def _say_how_it_begins(job: StreamJob, session: StreamSession, standing: Standing) -> None:
    """What a person should know before the first chunk."""
    if standing.goes_on:
        _say(f"going on at chunk {session.resumed_at_chunk}; {len(standing.kept)} are kept")
        return
    recipe, setup = job.setup.recipe, job.setup
    made_for = (recipe.default_height, recipe.default_width)
    if (setup.height, setup.width) != made_for:
        _say(
            f"this model was made for {made_for[1]}x{made_for[0]} pixels; at another size it may "
            "show too much or too little"
        )
    for flag in job.timeline.ignored:
        _say(f"{flag} is after the end and does nothing")
    if job.request.resume:
        _say(f"{job.request.out} has no stream to resume; starting anew")


def _num_chunks_saved(snapshot: Path) -> int:
    header = look(snapshot)
    return 0 if header is None else header.next_chunk_index


def _say(sentence: str) -> None:
    print(f"scope-rt: {sentence}", file=sys.stderr)


def _publish(
    summary: StreamSummary, files: OutputFiles, storyboard: Storyboard, spans: tuple[Span, ...]
) -> None:
    """Everything beside the video, which its writer has published."""
    try:
        storyboard.write(files.contact_sheet)
        if files.trace is not None:
            write_chrome_trace(files.trace, spans)
        summary.write(files.summary)
    except OSError as error:
        raise RecordingError(
            f"{files.video} is written, and what belongs beside it is not ({error.strerror}); "
            f"{remedy(error)}"
        ) from error


def _report(summary: StreamSummary, *, as_json: bool, may_go_on: bool) -> None:
    if as_json:
        print(summary.to_json(), flush=True)
    elif summary.ending is Ending.COMPLETE:
        print(table(summary), flush=True)
    if summary.ending is not Ending.COMPLETE:
        kept = f"{summary.totals.video_s:.2f} s are in {summary.files['video']}"
        more = "; add --resume to go on" if may_go_on else ""
        _say(f"{summary.ending}; the first {kept}{more}")
