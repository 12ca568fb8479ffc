"""The whole runtime behind one object: `for chunk in StreamSession(config).stream(prompt)`.

Every rank of a plan runs the same lines; on mesh ranks `stream` serves rank0 and yields nothing.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Self

from scope_contracts.errors import UserInputError
from scope_contracts.log_records import Closed, Durable, Published, Segment
from scope_contracts.retraction import Retraction
from scope_rt.config import StreamConfig
from scope_rt.control.chunk import Chunk
from scope_rt.control.inbox import Directive, Receipt, ScheduledDirective
from scope_rt.control.log_entries import failed_record
from scope_rt.control.loop import StreamLoop
from scope_rt.control.pace import Pace
from scope_rt.control.planner import Planner
from scope_rt.control.scheduled_event import ScheduledEvent, scheduled_record
from scope_rt.control.stages import Stages
from scope_rt.control.steering import Steering
from scope_rt.control.transition import TransitionSpec
from scope_rt.control.video_input import InputEncoder, VideoInput
from scope_rt.instruments import Instruments
from scope_rt.integrity.pictures import PictureCheck
from scope_rt.mesh.full_pipeline import FullPipeline
from scope_rt.mesh.loaded import MeshResumePoint
from scope_rt.mesh.rank import Rank
from scope_rt.models.feedback import Feedback, own_latents
from scope_rt.record.log import Log, NullLog
from scope_rt.record.reader import video_records
from scope_rt.recovery import Recovery
from scope_rt.resumed import AppliedAt, Resumed
from scope_rt.stream_setup import StreamSetup
from scope_rt.trace import Span, Trace

_LOG = logging.getLogger(__name__)


class StreamSession:
    """A stream of one model under one plan.

    Making one blocks until all ranks of the plan have met and loaded the model
    (`start_timeout_s` at most).

    Args:
        config: what to run; a `StreamSetup` is one that was checked against its model already.
            By default the embedded model in this process, with what the environment says.
        instruments: where stages are traced, and for the break-it suite its faults.
        feedback: what later chunks see of a chunk: its own latents, except in a replay.
        check_replaced: called once a new log is locked, in place of the session's own look at what
            an earlier stream left: what it raises leaves that as it is.
        rewind_to: resume the stream of `log` before this chunk, whatever its snapshot says: as if
            the later ones had not been, with what was in effect there. It needs latents in the log
            (`record_latents`). Only rank0 heeds it.

    Raises:
        UserInputError: a setting cannot be used; the sentence says what to change.
        ParityError: ranks were started with different settings, or hold other weights.
        LinkError: the other ranks did not come.
    """

    def __init__(
        self,
        config: StreamConfig | StreamSetup | None = None,
        *,
        instruments: Instruments | None = None,
        feedback: Feedback = own_latents,
        check_replaced: Callable[[], None] | None = None,
        rewind_to: int | None = None,
    ) -> None:
        if not isinstance(config, StreamSetup):
            config = StreamSetup.of(config or StreamConfig.load())
        self.setup = setup = config
        """The configuration and what follows from it with this model."""
        self._instruments = instruments or Instruments()
        if broken := self.broken_on_purpose:
            _LOG.warning("this stream is broken on purpose: %s", broken)
        self._feedback = feedback
        self._context = setup.context_memory() if setup.decodes else None
        self._spans: tuple[Span, ...] | None = None
        self._has_streamed = self._has_failed = self._is_cut_short = False
        self._closes_log = True
        self._recovery: Recovery | None = None
        self._loop: StreamLoop | None = None
        pipeline = None
        if self._context is not None and not self.is_control_rank:
            pipeline = FullPipeline(
                noise=setup.noise,
                decoder=setup.decoder(),
                context=self._context,
                feedback=feedback,
                watchdog=self._instruments.watchdog,
            )
        self._rank = Rank(
            setup, instruments=self._instruments, feedback=feedback, pipeline=pipeline
        )
        with ExitStack() as on_error, self._rank.reporting():
            on_error.callback(self._rank.leave)
            point = None
            if self.is_control_rank:
                self._recovery = Recovery(
                    setup,
                    run_id=self._rank.run_id,
                    instruments=self._instruments,
                    check_replaced=check_replaced,
                    rewind_to=rewind_to,
                )
                point = self._recovery.resume_point
                if setup.geometry.start_frame and point is None:
                    _ = self._recovery.start_frame  # before a log is begun anew that may hold it
            if point is None:
                self._rank.start()
            else:
                position = point.counts.position
                # Followers rebuild a decoder; what is pending is for rank0's consumer alone.
                tail = point.tail.trimmed(num_pending=0, num_frames=setup.num_tail_frames)
                self._rank.start(MeshResumePoint(position=position, tail=tail))
            if self._recovery is not None:
                self._loop = self._control(self._recovery)
            on_error.pop_all()

    @property
    def is_control_rank(self) -> bool:
        """Whether this process is rank0."""
        return self.setup.environment.rank == 0

    @property
    def broken_on_purpose(self) -> str:
        """Which faults are injected and which checks are off; "" for a stream as it should be."""
        return self._instruments.broken_on_purpose

    @property
    def trace(self) -> Trace:
        """Where this rank's stages are recorded."""
        return self._instruments.trace

    @property
    def resumed(self) -> Resumed | None:
        """What an earlier process left of the stream, where this session resumed it."""
        return None if self._recovery is None else self._recovery.resumed

    def earlier_video(self) -> Iterator[Segment | Durable | Published]:
        """What is whole of the video of a stream that was resumed, for a `VideoWriter` that
        continues it; read from the stream's log."""
        if self.resumed is None:
            return iter(())
        return video_records(self.resumed.log, self.resumed.progress)

    @property
    def resumed_at_chunk(self) -> int | None:
        """The first chunk that is planned anew, where this session resumed a stream."""
        return None if self.resumed is None else self.resumed.point.counts.next_chunk_index

    @property
    def retractions(self) -> tuple[Retraction, ...]:
        """Chunks that an earlier process showed and that may be wrong, where this session resumed
        its stream.

        Whoever holds chunks from `resumed_at_chunk` on drops them, and counts only the others as
        acknowledged: they are made again, with the same indices and a later epoch.
        """
        return () if self.resumed is None else tuple(self.resumed.progress.retractions)

    @property
    def applied(self) -> Mapping[str, AppliedAt]:
        """Where commands with an id took effect before this session resumed their stream, or do so
        again: whoever waits for their receipts must not post them a second time."""
        return {} if self.resumed is None else self.resumed.applied

    @property
    def num_acknowledged_before(self) -> int:
        """Chunks that the consumer had acknowledged at the resume point; it must hold them."""
        return 0 if self.resumed is None else self.resumed.point.num_acknowledged

    @property
    def log(self) -> Log:
        """The stream's log; one that writes nothing before `stream`, and where none is kept."""
        return NullLog() if self._recovery is None else self._recovery

    def take_log(self) -> Log:
        """The stream's log for who appends to it after this session, such as a video's writer.

        The session leaves it open then; who took it closes it. Close the session before the writer:
        chunks that it retracts as it ends are no longer cut from a video that is finished.
        """
        self._closes_log = False
        return self.log

    def stream(
        self,
        prompt: str,
        *,
        num_chunks: int | None = None,
        schedule: Sequence[ScheduledEvent] = (),
        acknowledged: Callable[[], int] | None = None,
        pace: Pace | None = None,
        video_input: VideoInput | None = None,
    ) -> Iterator[Chunk]:
        """Start an epoch with `prompt` and yield its chunks, without end by default.

        A chunk is yielded when it is decoded; `next` blocks for what one takes, and at most
        `group_timeout_s` for a rank that gives no answer. Scheduled chunk indices count from the
        start of the session. A session that resumed a stream continues with the prompt and the
        schedule it had, and `num_chunks` counts from its beginning. `acknowledged` says how many
        chunks the consumer holds for good (by default all but the last one yielded): a resumed
        stream yields first what is missing there. `pace` says when each chunk may be begun, so that
        a live stream is no further ahead than is wanted, and may end it. `video_input` gives
        pictures that chunks begin with. A second call ends the
        iterator of the first by an error, if that is asked for more. On a mesh rank this serves
        rank0 until the session there is closed, and yields nothing.

        Raises:
            UserInputError: a prompt cannot be read, the log cannot be written, it or the snapshot
                is of an earlier stream that `resume` says nothing about, or this session is
                closed; nothing was started, and an earlier stream's files are as they were.
            SnapshotError: an earlier stream's snapshot cannot be removed; nothing was started.
            LinkError: while it is iterated: a rank was lost; its name and the chunk are in it.
            ChunkTimeoutError: while it is iterated: a GPU did not finish a chunk in time. What
                cannot be interrupted is logged, and not raised before it comes back.
            IntegrityError: while it is iterated: something was computed wrong; `retraction` names
                the chunks that were yielded since the last good check.
        """
        if self._spans is not None:
            raise UserInputError("this session is closed; open a new one to stream again")
        is_first, self._has_streamed = not self._has_streamed, True
        if self._recovery is None or self._loop is None:
            if is_first:
                self._rank.serve()
            return iter(())
        if is_first and self._recovery.resumed is not None:
            self._recovery.open_log()
        else:
            self._begin(self._recovery, self._loop, prompt, schedule)
        return self._loop.run(
            num_chunks, acknowledged=acknowledged, pace=pace, video_input=video_input
        )

    def prompt(self, text: str, transition: TransitionSpec | None = None) -> Receipt:
        """Change the prompt at the next chunk that is planned, at once or by a soft transition.

        Returns at once; the receipt tells at which chunk it took effect.

        Raises:
            UserInputError: the prompt cannot be read, and the stream continues with the old one;
                or this session is closed.
            IntegrityError: encoding it twice gave two results; the stream continues likewise.
        """
        return self.steer(Steering(prompt=text, transition=transition))

    def hard_cut(self) -> Receipt:
        """Start a new epoch at the next chunk that is planned; older chunks are dropped."""
        return self.steer(Steering(hard_cut=True))

    def steer(self, asked: Steering) -> Receipt:
        """All that `asked` says, at the next chunk that is planned. Returns and raises as `prompt`;
        raises ScopeError where too many commands wait for that chunk."""
        directive = self._directive(
            asked.prompt, transition=asked.transition, hard_cut=asked.hard_cut
        )
        return self._post(
            replace(
                directive,
                drop_in_flight=asked.hard_cut,
                bias=asked.bias,
                seed=asked.seed,
                command_ids=(asked.command_id,) if asked.command_id else (),
            )
        )

    def close(self) -> tuple[Span, ...]:
        """End the stream on all ranks; returns the spans of every rank. Idempotent.

        Blocks until the chunks in flight are received. After a failure in the middle of a chunk the
        mesh cannot be told: this rank leaves, which is what tells the others, and its own spans are
        returned; its snapshot stays then, for a session that resumes.

        Raises:
            DamageError: the log of the stream that was resumed is damaged.
            IntegrityError: a rank found something wrong in what it holds; the chunks that are
                unverified are retracted.
        """
        if self._spans is None:
            self._spans = self._instruments.trace.spans
            try:
                if self._loop is not None and self._loop.midway_chunk is not None:
                    self._loop.inbox.close("the stream failed")
                else:
                    self._spans = self._end_together()
                    if not self._has_failed:
                        if self._recovery is not None and not self._is_cut_short:
                            self._recovery.settle_check()
                        self.log.append(Closed(at_s=time.time()))
            finally:
                if self._closes_log:
                    self.log.close()
                self._rank.leave()
        return self._spans

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close; but a mesh rank that failed leaves at once, which is what tells the others."""
        self._is_cut_short = error is not None
        if error is not None and not isinstance(error, GeneratorExit | KeyboardInterrupt):
            chunk = -1 if self._loop is None else self._loop.last_planned_chunk
            self.log.append(failed_record(chunk, error))
            self._has_failed = True
            if self._loop is not None and self._loop.midway_chunk is not None:
                # Else the stream is ended in order, of which nobody must be told.
                self._rank.report(error, chunk=self._loop.midway_chunk)
        if error is None or self.is_control_rank:
            self.close()
        else:
            self._rank.leave()

    def _begin(
        self,
        recovery: Recovery,
        loop: StreamLoop,
        prompt: str,
        schedule: Sequence[ScheduledEvent],
    ) -> None:
        """A new epoch, counted from here."""
        start = Directive(hard_cut=True, drop_in_flight=True)
        start = start.then(self._directive(prompt, hard_cut=True))
        events = [self._scheduled(event) for event in schedule]
        recovery.begin(prompt)
        if self.setup.geometry.start_frame and loop.last_planned_chunk < 0:
            recovery.append_start_frame()
        for event in schedule:
            recovery.append(scheduled_record(event))
        loop.inbox.post(start)
        loop.inbox.schedule(events)
        loop.begin()

    def _end_together(self) -> tuple[Span, ...]:
        if self._loop is None:
            return self._rank.gather_spans()
        with self._loop.retracting.watching():
            self._loop.close()
            return self._rank.gather_spans()  # until then a rank may find something wrong

    def _post(self, directive: Directive) -> Receipt:
        if self._loop is None:
            raise UserInputError("only rank0 takes control input; call this where rank is 0")
        if self._spans is not None:
            raise UserInputError("this session is closed; open a new one to stream again")
        return self._loop.inbox.post(directive)

    def _scheduled(self, event: ScheduledEvent) -> ScheduledDirective:
        directive = self._directive(
            event.prompt,
            transition=event.transition,
            hard_cut=event.hard_cut,
            recompute=event.recompute,
        )
        directive = replace(directive, bias=event.bias, seed=event.seed)
        return ScheduledDirective(chunk_index=event.chunk_index, directive=directive)

    def _directive(
        self,
        prompt: str | None,
        *,
        transition: TransitionSpec | None = None,
        hard_cut: bool = False,
        recompute: bool = False,
    ) -> Directive:
        if prompt is None and transition is not None:
            raise UserInputError("a transition leads to a new prompt; give one with it")
        return Directive(
            conditioning=None
            if prompt is None
            else self.setup.conditioning(prompt, self._instruments),
            transition=transition,
            hard_cut=hard_cut,
            recompute=recompute,
        )

    def _picture_check(self) -> PictureCheck | None:
        if not self.setup.verifies:
            return None
        integrity = self.setup.config.integrity
        return PictureCheck(
            self.setup.rank_zero_parts(),
            level=integrity.level,
            within=integrity.verify_within,
            checks=self._instruments.checks,
        )

    def _control(self, recovery: Recovery) -> StreamLoop:
        """Rank0's loop over what this session has set up."""
        setup = self.setup
        assert self._context is not None, "rank0 decodes"
        stages = Stages(
            mesh=self._rank.port(),
            context=self._context,
            noise=setup.noise,
            geometry=setup.geometry,
            cache=setup.cache_spec,
            start_frame=(lambda: recovery.start_frame) if setup.geometry.start_frame else None,
            input_encoder=lambda: InputEncoder(
                setup.codec.streaming_encoder(),
                setup.codec_sizes,
                frames_per_block=setup.recipe.frames_per_block,
            ),
            feedback=self._feedback,
            values=setup.value_rules,
            pictures=self._picture_check(),
            verify_within=setup.verify_within,
            verify_survivors=self._rank.verify_survivors,
        )
        return StreamLoop(
            Planner(settings=setup.settings),
            stages,
            setup.decoder(),
            max_in_flight=setup.topology.max_in_flight,
            num_tail_frames=setup.num_tail_frames,
            log=recovery,
            record_latents=recovery.records_latents,
            resume_points=recovery.resume_points,
            instruments=self._instruments,
            resumed=recovery.resume_point,
            shown_before=recovery.shown_before,
        )
