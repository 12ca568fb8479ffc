"""Rank0's side of `scope-rt stream`: every chunk is shown once, and what is left is whole files.

How a stream ends is decided in one place (`_conclude`). One that somebody may resume leaves its
segments, log and snapshot.
"""

import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from scope_contracts.errors import (
    DamageError,
    IntegrityError,
    RecordingError,
    ScopeError,
)
from scope_contracts.log_records import Opened
from scope_rt.disk import remedy
from scope_rt.file_digest import FileDigest
from scope_rt.launch_environment import LaunchEnvironment
from scope_rt.session import StreamSession
from scope_rt.topology import Topology
from scope_rt.trace import Span, write_chrome_trace
from scope_runners.exit_codes import FAILED, RETRACTED
from scope_runners.job import OutputFiles, StreamJob
from scope_runners.launcher import Progress, chunks_saved
from scope_runners.leftovers import say_how_to_resume
from scope_runners.progress import progress_bar
from scope_runners.shortage import is_full_disk
from scope_runners.stage import Stage
from scope_runners.stop_request import StopRequest, taking_stop_signals
from scope_runners.storyboard import Scene, scenes, write_storyboard
from scope_runners.summary import Ending, Moments, StreamSummary, summarise, table
from scope_runners.wording import counted, retracted_chunks


@dataclass(slots=True, kw_only=True)
class _Run:
    """All that a stream has while rank0 shows it; moments in seconds."""

    job: StreamJob
    session: StreamSession
    stage: Stage
    stop: StopRequest
    progress: Progress
    started_s: float
    ready_s: float

    @property
    def environment(self) -> LaunchEnvironment:
        return self.job.setup.environment

    @property
    def was_ended_by_person(self) -> bool:
        """Whether Ctrl-C ended the stream: other signals come from a machine that shuts down too,
        or from a launcher that has lost a host, and the stream can then be resumed."""
        return self.stop.signum == signal.SIGINT

    def will_start_again(self, error: BaseException) -> bool:
        """Whether the launcher starts the ranks again after `error` in this process."""
        environment = self.environment
        if self.stop.signum is not None or is_full_disk(error):
            return False
        may_restart = environment.may_restart
        if environment.is_after_wrong and isinstance(error, IntegrityError):
            may_restart = False
        restarts = environment.restarts_after_progress
        return may_restart or (restarts and self.progress.has_risen())


def control(job: StreamJob, session: StreamSession, *, started_s: float) -> int:
    """Make the video; a stream that is cut short leaves a shorter one. Returns the exit code.

    Where the ranks will be started again after a failure, all is left as it is for them.
    """
    ready_s = time.perf_counter()
    stop = StopRequest()
    with taking_stop_signals(stop.take), ExitStack() as at_end:
        at_end.push(session)
        stage = Stage(job, session)
        at_end.pop_all()  # from here on the session is ended where it is used
        _say_how_it_begins(job, session, stage)
        run = _Run(
            job=job,
            session=session,
            stage=stage,
            stop=stop,
            progress=Progress(
                lambda: chunks_saved(job.files.snapshot),
                # What is made again is no progress.
                most=max((each.last_chunk + 1 for each in stage.retractions), default=0),
            ),
            started_s=started_s,
            ready_s=ready_s,
        )
        at_end.callback(stage.log.close)
        with stage.writer:
            try:
                failure, spans = _play(run)
                if failure is not None and not stage.num_chunks:
                    if not stage.resumes:
                        stage.abort()
                    raise failure
                return _conclude(run, failure, spans)
            except KeyboardInterrupt:
                stage.interrupt()
                _say("interrupted")
                # Else the launcher says it, whatever became of rank0.
                if not job.setup.environment.launched:
                    say_how_to_resume(job)
                return 128 + (stop.signum or signal.SIGINT)
            except Exception as error:
                if not (stage.num_chunks or stage.resumes or run.will_start_again(error)):
                    stage.forget()
                raise


def _play(run: _Run) -> tuple[ScopeError | None, tuple[Span, ...]]:
    """Show all that is left; a failure that no restart follows is returned."""
    try:
        with ExitStack() as on_error:
            on_error.push(run.session)
            if run.stage.published is None:
                _show_all(run)
            on_error.pop_all()
        return None, run.session.close()
    except RecordingError:
        raise
    except ScopeError as error:
        if isinstance(error, IntegrityError) and error.retraction is not None:
            run.stage.retractions.append(error.retraction)
            _say(f"retracted {retracted_chunks(error.retraction)}: {error.retraction.reason}")
        if (
            run.will_start_again(error)
            or run.stage.writer.has_ended  # there is no video to conclude where it found the error
            or is_full_disk(error)  # nor is there room for one
        ):
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
    with progress_bar(timeline.num_frames, enabled=not request.json) as bar:
        for chunk in chunks:
            run.stage.show(chunk)
            bar(chunk)
            if run.stop.signum is not None:
                return


def _conclude(run: _Run, failure: ScopeError | None, spans: tuple[Span, ...]) -> int:
    """Publish what was made and say so; raises `failure` once that is done."""
    job, stage, stop = run.job, run.stage, run.stop
    # An error of integrity may come with the last chunk: a resumed stream makes it again.
    is_wrong = isinstance(failure, IntegrityError) and not isinstance(failure, DamageError)
    complete = stage.num_chunks >= job.timeline.num_chunks and not is_wrong
    keep = not complete and (failure is not None or not run.was_ended_by_person)
    stage.writer.close(keep=keep)
    cut_short = Ending.COMPLETE if complete else Ending.INTERRUPTED
    summary = summarise(
        job,
        chunks := stage.records(),
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
        restarts=max(run.environment.attempt, stage.num_starts),
        recording_failure=stage.log.failure or stage.log.latents_failure,
        broken_on_purpose=run.session.broken_on_purpose,
        retractions=stage.retractions,
        num_unverified=stage.num_unverified,
        files=stage.files,
    )
    story = scenes(chunks, job.timeline, fps=job.setup.recipe.fps)
    video = stage.writer.published or stage.published
    assert video is not None, "a stream of a chunk has a video"
    summary = _publish(summary, stage.files, story, spans, scale=stage.writer.scale, video=video)
    if not keep:
        stage.forget()
    _report(summary, as_json=job.request.json, may_be_resumed=keep)
    if failure is not None:
        raise failure
    if complete:
        return RETRACTED if stage.retractions else 0
    return FAILED if stop.signum is None else 128 + stop.signum


def _say_how_it_begins(job: StreamJob, session: StreamSession, stage: Stage) -> None:
    """What a person should know before the first chunk."""
    if stage.resumes:
        kept = counted(stage.num_before, "chunk")
        _say(f"resuming at chunk {session.resumed_at_chunk}, after {kept} in the video")
        if stage.made_before and (said := made_by_others(stage.made_before, job.setup.topology)):
            _say(said)
        for each in stage.retractions:
            _say(f"retracted, and made again: {retracted_chunks(each)}")
        return
    recipe, setup = job.setup.recipe, job.setup
    made_for = (recipe.default_height, recipe.default_width)
    if (setup.height, setup.width) != made_for:
        _say(
            f"this model was made for {made_for[1]}x{made_for[0]} pixels; at another size it may "
            "show too much or too little"
        )
    layout = setup.model.layout
    if layout.looks_like:
        _say(
            f"{layout.family.name} is what --recipe says; the files are as those of "
            f"{' or '.join(layout.looks_like)}, and with the recipe of others the video is wrong"
        )
    for flag in job.timeline.ignored:
        _say(f"{flag} is after the end and does nothing")
    if job.request.resume:
        _say(f"{job.request.out} has no stream to resume; starting anew")


def made_by_others(before: Opened, topology: Topology) -> str | None:
    """What a person should know who resumes a stream with another plan or degree; else None."""
    was = f"plan {before.plan_id} --tp {before.tp_degree}"
    now = f"plan {topology.plan_id} --tp {topology.tp_degree}"
    if was == now:
        return None
    if before.tp_degree == topology.tp_degree:
        what = "computes the same bits"
    else:
        what = "rounds otherwise: pictures are as good, and not the same bits"
    return f"the stream was made by {was}; {now}, which makes the rest, {what}"


def _say(sentence: str) -> None:
    print(f"scope-rt: {sentence}", file=sys.stderr)


def _publish(
    summary: StreamSummary,
    files: OutputFiles,
    story: Sequence[Scene],
    spans: tuple[Span, ...],
    *,
    scale: int,
    video: FileDigest,
) -> StreamSummary:
    """Everything beside the `video`, which its writer has published; the summary as written."""
    try:
        write_storyboard(files.contact_sheet, files.video, story, scale=scale)
        if files.trace is not None:
            write_chrome_trace(files.trace, spans)
        summary = summary.with_digests(video)
        summary.write(files.summary)
        return summary
    except OSError as error:
        raise RecordingError(
            f"{files.video} is written, and what belongs beside it is not ({error.strerror}); "
            f"{remedy(error)}"
        ) from error


def _report(summary: StreamSummary, *, as_json: bool, may_be_resumed: bool) -> None:
    if as_json:
        print(summary.to_json(), flush=True)
    elif summary.ending is Ending.COMPLETE:
        print(table(summary), flush=True)
    if summary.ending is not Ending.COMPLETE:
        kept = f"{summary.totals.video_s:.2f} s are in {summary.files['video']}"
        more = "; add --resume to resume it" if may_be_resumed else ", which is finished"
        _say(f"{summary.ending}; the first {kept}{more}")
