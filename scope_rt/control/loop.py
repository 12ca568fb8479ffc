"""THE loop: plan and send; receive; begin to save, decode, log; wait for the save; yield.

A result of an older epoch is never decoded and never yielded. What a restart needs is saved before
a chunk is handed out, so none is yielded twice and none is skipped; it is written while the chunk
is decoded. After an error of integrity, what is saved is verified: chunks that were handed out and
are not are retracted and planned again.
"""

from collections.abc import Callable, Iterator
from functools import partial

from scope_contracts.errors import ScopeError, UserInputError
from scope_rt.control.chunk import Arrived, Chunk
from scope_rt.control.decoding import Decoding
from scope_rt.control.delivery import Delivery
from scope_rt.control.emission import Emission
from scope_rt.control.given_pictures import GivenPictures
from scope_rt.control.inbox import ControlInbox, Directive, Taken
from scope_rt.control.log_entries import finished_record
from scope_rt.control.pace import FlatOut, Pace
from scope_rt.control.pipeline import Pipeline
from scope_rt.control.planner import Planner
from scope_rt.control.position import Position
from scope_rt.control.resume_point import ResumePoint, ResumePoints
from scope_rt.control.retracting import Retracting
from scope_rt.control.saving import Saving
from scope_rt.control.stages import Stages
from scope_rt.control.unverified import Unverified
from scope_rt.control.verified_inbox import VerifiedInbox
from scope_rt.control.video_input import VideoInput
from scope_rt.faults import FaultPoint
from scope_rt.instruments import Instruments
from scope_rt.record.log import Log
from scope_rt.record.runs import Runs
from scope_rt.tensors import bytes_of
from scope_rt.vae.codec import StreamingDecoder


class StreamLoop:
    """Drives one stream. Only one thread may run it; any thread may post to its `inbox`."""

    def __init__(
        self,
        planner: Planner,
        stages: Stages,
        decoder: StreamingDecoder,
        *,
        max_in_flight: int,
        num_tail_frames: int,
        log: Log,
        record_latents: bool,
        instruments: Instruments,
        resume_points: ResumePoints | None = None,
        resumed: ResumePoint | None = None,
        shown_before: Runs | None = None,
    ) -> None:
        """`num_tail_frames` latent frames before the oldest pending chunk rebuild decoder and
        context. Without `resume_points` nobody can resume this stream.

        `shown_before` are the chunks of the resumed stream before its resume point, with their
        epochs."""
        verifies = stages.values is not None
        self.inbox = VerifiedInbox(instruments) if verifies else ControlInbox()
        self._stages, self._instruments = stages, instruments
        self._log, self._record_latents = log, record_latents
        position, self._delivery = Position(planner=planner), Delivery()
        if resumed is not None:
            position = resumed.position(planner.settings)
            self._delivery.resume(resumed.arrived(), num_acknowledged=resumed.num_acknowledged)
            self.inbox.schedule(resumed.scheduled)
        self._is_rebuilt, self._has_sent = resumed is None, resumed is not None
        self._is_closed = False
        self._num_runs = 0
        self._pace: Pace = FlatOut()
        self._given = GivenPictures(stages)
        self._pipeline = Pipeline(
            position, stages, max_in_flight=max_in_flight, log=log, instruments=instruments
        )
        proved = self._pipeline.proved
        self._emission = Emission(instruments.checks, proved) if verifies else None
        """None verifies nothing, and keeps no chunk."""
        self._decoding = Decoding(
            decoder, stages, self._pipeline, emission=self._emission, instruments=instruments
        )
        self._saving = Saving(
            self._pipeline,
            self._delivery,
            self.inbox,
            log=log,
            resume_points=resume_points,
            num_tail_frames=num_tail_frames,
            resumed=resumed,
        )
        next_chunk = self.last_planned_chunk + 1
        self._unverified = Unverified(
            stages.verify_within, next_chunk=next_chunk, shown=shown_before
        )
        self.retracting = Retracting(
            self._unverified,
            log,
            verify_survivors=stages.verify_survivors,
            save_cut=self._save_cut,
        )
        """Watches what may find something wrong."""

    @property
    def midway_chunk(self) -> int | None:
        """The chunk in the middle of which an error left the mesh, where nothing can end it."""
        return self._pipeline.midway_chunk

    @property
    def last_planned_chunk(self) -> int:
        """-1 before the first."""
        return self._pipeline.position.planner.counts.next_chunk_index - 1

    def begin(self) -> None:
        """Count chunks from here; what the consumer was given before is acknowledged.

        A chunk that an error kept from the consumer is forgotten: the stream begins with a cut.
        """
        self._delivery.begin()
        self._pipeline.begin()
        self._saving.begin()
        self.retracting.begin(self.last_planned_chunk + 1)
        if self._emission is not None:
            self._emission.begin()
        self._has_sent, self._is_rebuilt = False, True

    def run(
        self,
        num_chunks: int | None = None,
        *,
        acknowledged: Callable[[], int] | None = None,
        pace: Pace | None = None,
        video_input: VideoInput | None = None,
    ) -> Iterator[Chunk]:
        """Yield chunks until `num_chunks` were yielded since the last `begin`, or without end.

        `pace` says when each may be begun, `video_input` what it begins with. `acknowledged` says
        how many of them the consumer holds for good; by default, all but the one it was given last.
        A resumed stream yields first what its consumer lacks. The iterator of an earlier call gets
        no chunk any more.

        Raises:
            UserInputError: at `next`: a later call has taken this one's place.
            IntegrityError: at `next`: something was computed wrong; its `retraction` names the
                chunks that were yielded since the last good check.
            LinkError, ContractError, LifecycleError, ParityError, SnapshotError: as `Pipeline`.
        """
        self._num_runs += 1
        run = self._run(self._num_runs, num_chunks, acknowledged)
        self._pace, self._given.source = pace or FlatOut(), video_input
        return run

    def _run(
        self, number: int, num_chunks: int | None, acknowledged: Callable[[], int] | None
    ) -> Iterator[Chunk]:
        self._check_is_newest(number)
        self._delivery.ask(num_chunks, acknowledged)
        with self.retracting.watching():
            for chunk in self._chunks():
                if self._emission is not None:
                    self._emission.verify(chunk)
                yield chunk
                self._check_is_newest(number)

    def _check_is_newest(self, number: int) -> None:
        if number != self._num_runs:
            raise UserInputError(
                "a later stream() of this session has taken the place of this iterator; iterate "
                "that one, or open a session for each stream"
            )

    def _chunks(self) -> Iterator[Chunk]:
        yield from self._redeliver()
        while self._delivery.wants_more():
            self._refill()
            if not self._pipeline.in_flight:  # none may be begun yet
                if not self._pace.wait(self.last_planned_chunk + 1):
                    break
                continue
            arrived = self._pipeline.receive()
            if arrived is None:  # a hard cut has ended its epoch
                continue
            self._refill()  # the mesh generates while rank0 decodes,
            chunk = self._finish(arrived)
            self._refill()  # and while the consumer works; a recompute needed these frames
            self._saving.finish()
            self._pipeline.delivered()
            yield self._instruments.faults.reach(FaultPoint.EMIT, chunk.chunk_index, chunk)
        self._saving.end()

    def close(self) -> None:
        """Receive what is in flight, which cannot be stopped, and tell the mesh to end."""
        self._is_closed = True
        self.inbox.close()
        self._pipeline.close()
        if not self.retracting.is_wrong:  # what is known is said once
            self._decoding.close(self.last_planned_chunk)

    def _refill(self) -> None:
        """Send as many chunks as have room and will be wanted."""
        if self._is_closed:
            raise UserInputError("this session is closed; open a new one to stream again")
        pipeline = self._pipeline
        while (
            not self._saving.is_awaited
            and pipeline.has_room
            and self._delivery.wants_more(pipeline.num_under_way)
        ):
            # A chunk whose context is still on its way waits; what is asked for meanwhile counts.
            index = pipeline.position.planner.counts.next_chunk_index
            if not self._pace.may_begin(index):
                return
            taken = self.inbox.take(index, unless=pipeline.must_wait)
            if taken is None:
                return
            self._send(taken)

    def _send(self, taken: Taken) -> None:
        self._has_sent = True
        try:
            planner = self._pipeline.position.planner
            given = self._given.next(planner, hard_cut=taken.directive.hard_cut)
            envelope = self._pipeline.send(taken.directive, given)
        except ScopeError as error:
            taken.refuse(error)
            raise
        acknowledge = partial(taken.acknowledge, envelope.chunk_index, envelope.cache_epoch)
        if taken.directive == Directive():
            acknowledge()
            return
        self._saving.acknowledge_when_saved(acknowledge)
        if not self._pipeline.awaits_decode:
            self._saving.save()

    def _finish(self, arrived: Arrived) -> Chunk:
        """Save a chunk as pending and meanwhile decode it, verify its frames and log it."""
        tail = self._saving.begin_with(arrived, sinks=self._stages.context.sinks)
        index = arrived.envelope.chunk_index
        arrived = self._instruments.faults.reach(FaultPoint.ARRIVED, index, arrived)
        chunk, frames = self._decoding.decode(arrived, tail)
        blob = self._blob(chunk)
        self._pipeline.decoded(frames)
        self._delivery.add(arrived)
        self._unverified.add_shown(chunk.chunk_index, chunk.cache_epoch)
        self._saving.tail = tail
        self._log.append(finished_record(chunk, with_latents=self._record_latents), blob)
        return chunk

    def _blob(self, chunk: Chunk) -> bytes:
        """A chunk's latents for the recording, verified; empty where it has none.

        A copy, as it is written later: what the consumer does to its chunk must not be in it.
        """
        if not self._record_latents:
            return b""
        blob = bytes(bytes_of(chunk.latents))
        self._pipeline.check_kept(
            chunk.chunk_index, "latents for the recording", blob, chunk.latents_sha256
        )
        return blob

    def _redeliver(self) -> Iterator[Chunk]:
        """After a restart: decode the tail again, and yield what the consumer lacks of it."""
        if not self._is_rebuilt:
            yield from self._decoding.decode_again(self._delivery.missing(), self._saving.tail)
            self._is_rebuilt = True

    def _save_cut(self, chunk_index: int, num_retracted: int) -> None:
        if self._has_sent:
            self._saving.save_cut(chunk_index, num_retracted)
