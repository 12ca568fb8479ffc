"""`scope-rt stream`: one request, one video; rank0 alone speaks, and what is left is whole files.

`python -m scope_runners.stream` under torchrun is one rank of the same job; started by itself it
launches the ranks it needs.
"""

import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Self

import torch

from scope_contracts.errors import ScopeError, UserInputError
from scope_rt.config import RuntimeConfig
from scope_rt.control.chunk import Chunk
from scope_rt.mesh.topology import Topology
from scope_rt.session import StreamSession
from scope_rt.streaming.trace import NullTrace, Span, Trace, TraceRecorder, write_chrome_trace
from scope_rt.streaming.video_writer import RecordingError, VideoWriter
from scope_runners.job import (
    OutputFiles,
    StreamJob,
    available_cores,
    check_machine,
    check_outputs,
    degree_of,
    prepare,
)
from scope_runners.journal import Journal
from scope_runners.launcher import Attempt, FileWatch, Restarts, launch_attempts
from scope_runners.main import FAILED, guarded
from scope_runners.progress import progress_bar
from scope_runners.request import StreamRequest, parse_stream_request
from scope_runners.storyboard import Storyboard
from scope_runners.summary import ChunkRecord, Ending, Moments, StreamSummary, summarise, table


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job of `argv` and return the exit code; a mesh rank's errors carry its number."""
    arguments = sys.argv[1:] if argv is None else list(argv)

    def run_as_rank() -> int:
        rank = RuntimeConfig.from_environment().rank
        return guarded(run, speaker=f"rank {rank}" if rank else "scope-rt")

    def run() -> int:
        return run_here_or_launch(parse_stream_request(arguments), arguments)

    return guarded(run_as_rank)


def run_here_or_launch(request: StreamRequest, argv: Sequence[str]) -> int:
    """Run this process's part of `request`, or start the processes it needs with `argv`."""
    started_s = time.perf_counter()
    config = RuntimeConfig.from_environment()
    job = prepare(request, config)
    if config.launched or job.topology.world_size == 1:
        torch.set_num_threads(request.threads)
        if not 0 <= config.rank < config.world_size:
            raise UserInputError(
                f"RANK is {config.rank} of {config.world_size} processes; unset RANK, or start all "
                "ranks with torchrun"
            )
        return _control(job, config, started_s) if config.rank == 0 else _serve(job, config)
    check_machine(job, num_cores=available_cores(), num_gpus=torch.cuda.device_count())
    files = check_outputs(job)

    def attempt_of(number: int) -> Attempt:
        topology = Topology(plan_id=request.plan, tp_degree=degree_of(request, number))
        return Attempt(argv=argv, num_ranks=topology.world_size)

    return launch_attempts(
        "scope_runners.stream",
        attempt_of,
        threads=request.threads,
        restarts=Restarts(
            most=request.max_restarts, made_progress=FileWatch(files.checkpoint).has_changed
        ),
    )


class StopRequest:
    """The first signal to stop asks for an end after this chunk, the second interrupts it."""

    def __init__(self) -> None:
        self.signum: int | None = None

    def __enter__(self) -> Self:
        self._handlers = {
            signum: signal.signal(signum, self._take)
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        return self

    def __exit__(self, *reason: object) -> None:
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)

    def _take(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            raise KeyboardInterrupt
        self.signum = signum


class _Shown:
    """What rank0 keeps of the chunks it has shown, in this process and before it."""

    def __init__(self, job: StreamJob, files: OutputFiles, *, num_kept: int | None) -> None:
        """`num_kept` chunks were shown before a restart, and stay; None keeps all there are."""
        self.storyboard = Storyboard(job.timeline, fps=job.recipe.fps)
        self.chunks: list[ChunkRecord] = []
        self.first_frame_s: float | None = None
        self.journal, entries = Journal.open(files.journal, num_chunks=num_kept)
        for chunk, picture in entries:
            self.storyboard.add(chunk, picture)
            self.chunks.append(chunk.ordered())
        self.num_before = len(self.chunks)

    def add(self, chunk: Chunk) -> None:
        if self.first_frame_s is None:
            self.first_frame_s = time.perf_counter()
        record, picture = ChunkRecord.of(chunk), None
        if self.storyboard.keeps(chunk.chunk_index):
            picture = chunk.frames[len(chunk.frames) // 2]
        self.storyboard.add(record, picture)
        self.journal.add(record, picture)
        self.chunks.append(record)

    def encoded(self, encode_ms: Sequence[float]) -> list[ChunkRecord]:
        """All chunks, with what writing took where this process wrote them."""
        made = zip(self.chunks[self.num_before :], encode_ms, strict=True)
        return [*self.chunks[: self.num_before], *(chunk.encoded(ms) for chunk, ms in made)]


def _serve(job: StreamJob, config: RuntimeConfig) -> int:
    """A mesh rank: generate for rank0 until it ends the stream, also when a person ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with _session(job, config, _trace(job, config)) as session:
        for _ in session.stream(job.request.prompt):
            raise AssertionError("a mesh rank shows no chunk")
    return 0


def _control(job: StreamJob, config: RuntimeConfig, started_s: float) -> int:
    """Rank0: make the video; a stream that is cut short leaves a shorter one.

    Where the ranks will be started again after a failure, all is left as it is for them.
    """
    files = check_outputs(job)
    session = _session(job, config, _trace(job, config), files)
    ready_s = time.perf_counter()
    goes_on = session.resumed_at_chunk is not None
    if not goes_on:
        _say_once(job)
    if job.request.resume and not goes_on:
        print(f"scope-rt: {files.video} has no stream to resume; starting anew", file=sys.stderr)
    writer = VideoWriter(
        files.video,
        width=job.width,
        height=job.height,
        fps=job.recipe.fps,
        trace=session.trace,
        resume=goes_on,
        keep_on_error=True,
    )
    # A writer joins its file before the checkpoint goes: killed in between, all is shown already.
    is_published = writer.held_chunks < session.num_held_before and files.video.exists()
    num_kept = writer.held_chunks if goes_on else 0
    shown = _Shown(job, files, num_kept=None if is_published else num_kept)
    failure, spans = None, tuple[Span, ...]()
    with StopRequest() as stop, writer:
        try:
            with ExitStack() as on_failure:
                on_failure.push(session)
                if not is_published:
                    _show_all(job, session, writer, shown, stop)
                on_failure.pop_all()
            spans = session.close()
        except RecordingError:
            raise
        except ScopeError as error:
            if config.may_restart:
                raise
            failure = error
        except KeyboardInterrupt:
            writer.abort()
            _forget(files, shown)
            raise
        if failure is not None and not shown.chunks:
            writer.abort()
            _forget(files, shown)
            raise failure
        writer.close()
        complete = len(shown.chunks) == job.timeline.num_chunks
        cut_short = Ending.COMPLETE if complete else Ending.INTERRUPTED
        summary = summarise(
            job,
            shown.encoded(writer.encode_ms),
            ending=Ending.FAILED if failure is not None else cut_short,
            moments=Moments(
                started_s=started_s,
                ready_s=ready_s,
                first_frame_s=shown.first_frame_s or time.perf_counter(),
                written_s=time.perf_counter(),
                num_frames=writer.num_frames,
            ),
            cache_bytes=session.cache_bytes,
            blocked_s=writer.blocked_s,
            restarts=config.attempt,
            recording_failure=session.recording_failure,
            files=files,
        )
        _publish(summary, files, shown.storyboard, spans)
        _forget(files, shown)
        _report(summary, as_json=job.request.json)
        if failure is not None:
            raise failure
        if complete:
            return 0
        return FAILED if stop.signum is None else 128 + stop.signum


def _forget(files: OutputFiles, shown: _Shown) -> None:
    """Nobody will go on with this stream."""
    shown.journal.remove()
    files.checkpoint.unlink(missing_ok=True)


def _say_once(job: StreamJob) -> None:
    """What a person should know before the stream begins."""
    made_for = (job.recipe.default_height, job.recipe.default_width)
    if (job.height, job.width) != made_for:
        print(
            f"scope-rt: this model was made for {made_for[1]}x{made_for[0]} pixels; at another "
            "size it may show too much or too little",
            file=sys.stderr,
        )
    for flag in job.timeline.ignored:
        print(f"scope-rt: {flag} is after the end and does nothing", file=sys.stderr)


def _trace(job: StreamJob, config: RuntimeConfig) -> Trace:
    return NullTrace() if job.request.trace is None else TraceRecorder(config.rank)


def _session(
    job: StreamJob,
    config: RuntimeConfig,
    trace: Trace,
    files: OutputFiles | None = None,
) -> StreamSession:
    request = job.request
    return StreamSession(
        request.model,
        plan=request.plan,
        tp=job.topology.tp_degree,
        seed=request.seed,
        height=job.height,
        width=job.width,
        kv_cache_attention_bias=request.kv_cache_attention_bias,
        recompute=request.recompute,
        trace=trace,
        checkpoint=None if files is None else files.checkpoint,
        resume=True if request.resume else None,
        record=request.record,
        config=config,
    )


def _show_all(
    job: StreamJob,
    session: StreamSession,
    writer: VideoWriter,
    shown: _Shown,
    stop: StopRequest,
) -> None:
    """Show, keep and write every chunk, until the end or the first one after a stop request."""
    timeline = job.timeline
    chunks = session.stream(
        job.request.prompt,
        num_chunks=timeline.num_chunks,
        schedule=timeline.events,
        num_held=lambda: writer.durable_chunks,
    )
    num_frames = timeline.num_chunks * timeline.frames_per_chunk
    with progress_bar(num_frames, enabled=not job.request.json) as show:
        for chunk in chunks:
            shown.add(chunk)
            writer.write(chunk.frames)
            show(chunk)
            if stop.signum is not None:
                return


def _publish(
    summary: StreamSummary, files: OutputFiles, storyboard: Storyboard, spans: tuple[Span, ...]
) -> None:
    """Everything beside the video, which its writer has published."""
    storyboard.write(files.contact_sheet)
    if files.trace is not None:
        write_chrome_trace(files.trace, spans)
    summary.write(files.summary)


def _report(summary: StreamSummary, *, as_json: bool) -> None:
    if as_json:
        print(summary.to_json(), flush=True)
    elif summary.ending is Ending.COMPLETE:
        print(table(summary), flush=True)
    if summary.ending is not Ending.COMPLETE:
        kept = f"{summary.totals.video_s:.2f} s are in {summary.files['video']}"
        print(f"scope-rt: {summary.ending}; the first {kept}", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
