"""THE loop: plan and send; receive; decode; log and save; yield.

A result of an older epoch is never decoded and never yielded. What a restart needs is saved before
a chunk is handed out, so none is yielded twice and none is skipped. After an error of integrity,
what is saved is verified: chunks that were handed out and are not are retracted and planned again.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from torch import Tensor

from scope_contracts.errors import (
    DamageError,
    IntegrityError,
    LinkError,
    ScopeError,
    UserInputError,
)
from scope_contracts.retraction import Retraction
from scope_rt.control.chunk import Arrived, Chunk
from scope_rt.control.delivery import Delivery
from scope_rt.control.emission import Emission
from scope_rt.control.inbox import ControlInbox, Directive, Taken
from scope_rt.control.log_entries import finished_record, retracted_record
from scope_rt.control.pipeline import Pipeline, Stages
from scope_rt.control.planner import Planner
from scope_rt.control.position import Position
from scope_rt.control.resume_point import ResumePoint, ResumePoints, point_of_cut, resume_point
from scope_rt.control.tail import StreamTail, TailChunk
from scope_rt.control.unverified import Unverified
from scope_rt.control.verified_inbox import VerifiedInbox
from scope_rt.faults import FaultPoint
from scope_rt.instruments import Instruments
from scope_rt.record.runs import Runs
from scope_rt.record.stream_log import Log
from scope_rt.tensors import bytes_of
from scope_rt.vae.codec import StreamingDecoder

_LOG = logging.getLogger(__name__)


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
        self._stages, self._decoder, self._instruments = stages, decoder, instruments
        self._log, self._record_latents, self._resume_points = log, record_latents, resume_points
        self._num_tail_frames = num_tail_frames
        self._delivery, self._tail = Delivery(), StreamTail()
        self._emission = None if stages.values is None else Emission(instruments.checks)
        """None verifies nothing, and keeps no chunk."""
        position = Position(planner=planner)
        if resumed is not None:
            position = resumed.position(planner.settings)
            self._delivery.resume(resumed.arrived(), num_acknowledged=resumed.num_acknowledged)
            self._tail = resumed.tail
            self.inbox.schedule(resumed.scheduled)
        self._is_rebuilt = resumed is None
        self._first_scheduled = 0 if resumed is None else resumed.first_scheduled
        self._is_closed, self._has_sent = False, resumed is not None
        self._is_wrong = False
        """Whether an error of integrity has ended this stream."""
        self._retraction: Retraction | None = None
        self._num_runs = 0
        self._when_saved: Callable[[], None] | None = None
        """Acknowledges control input, once the chunk that has it is part of the resume point."""
        self._pipeline = Pipeline(
            position, stages, max_in_flight=max_in_flight, log=log, instruments=instruments
        )
        self._unverified = Unverified(
            stages.verify_within, next_chunk=self.last_planned_chunk + 1, shown=shown_before
        )

    @property
    def midway_chunk(self) -> int | None:
        """The chunk in the middle of which an error left the mesh, where nothing can end it."""
        return self._pipeline.midway_chunk

    @property
    def last_planned_chunk(self) -> int:
        """-1 before the first."""
        return self._pipeline.position.planner.next_chunk_index - 1

    def begin(self) -> None:
        """Count chunks from here; what the consumer was given before is acknowledged.

        A chunk that an error kept from the consumer is forgotten: the stream begins with a cut.
        """
        self._delivery.begin()
        self._pipeline.delivered()
        self._unverified.begin(self.last_planned_chunk + 1)
        if self._emission is not None:
            self._emission.begin()
        self._first_scheduled, self._retraction, self._has_sent = 0, None, False
        self._is_rebuilt, self._is_wrong = True, False

    def run(
        self, num_chunks: int | None = None, *, acknowledged: Callable[[], int] | None = None
    ) -> Iterator[Chunk]:
        """Yield chunks until `num_chunks` were yielded since the last `begin`, or without end.

        `acknowledged` says how many of them the consumer holds for good; by default, all but the
        one it was given last. A resumed stream yields first what its consumer lacks. The iterator
        of an earlier call gets no chunk any more.

        Raises:
            UserInputError: at `next`: a later call has taken this one's place.
            IntegrityError: at `next`: something was computed wrong; its `retraction` names the
                chunks that were yielded since the last good check.
            LinkError, ContractError, LifecycleError, ParityError, SnapshotError: as `Pipeline`.
        """
        self._num_runs += 1
        return self._run(self._num_runs, num_chunks, acknowledged)

    def _run(
        self, number: int, num_chunks: int | None, acknowledged: Callable[[], int] | None
    ) -> Iterator[Chunk]:
        self._check_is_newest(number)
        self._delivery.ask(num_chunks, acknowledged)
        with self.retracting():
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
            arrived = self._pipeline.receive()
            if arrived is None:  # a hard cut has ended its epoch
                continue
            self._refill()  # the mesh generates while rank0 decodes,
            chunk = self._finish(arrived)
            self._refill()  # and while the consumer works; a recompute needed these frames
            self._save()
            self._pipeline.delivered()
            yield self._instruments.faults.reach(FaultPoint.EMIT, chunk.chunk_index, chunk)

    def close(self) -> None:
        """Receive what is in flight, which cannot be stopped, and tell the mesh to end."""
        self._is_closed = True
        self.inbox.close()
        self._pipeline.close()
        if self._stages.pictures is not None and not self._is_wrong:  # what is known is said once
            with self._instruments.watchdog.section("verifying codec and text encoder"):
                self._stages.pictures.close(self.last_planned_chunk)

    @contextmanager
    def retracting(self) -> Iterator[None]:
        """An `IntegrityError` in here retracts what it speaks against, and names it; so does what
        the ranks that are left after a loss find in what they hold."""
        try:
            yield
        except DamageError:  # of the log: no chunk is wrong
            raise
        except IntegrityError as error:
            self._retract(error)
            raise
        except LinkError as loss:
            try:
                self._verify_survivors()
            except IntegrityError as error:
                self._retract(error)
                raise error from loss
            raise

    def _verify_survivors(self) -> None:
        """Lost is not wrong: the cache is rebuilt from what was shown. That is made from what the
        ranks hold who are left, which they verify, and from what the lost one held.

        Raises:
            IntegrityError: a rank holds something else.
        """
        silent = self._stages.verify_survivors()
        chunks = self._unverified.not_verified
        if silent and chunks:
            _LOG.warning(
                "rank %s held state that nobody can verify any more: chunks %d to %d, made since "
                "all of it was verified last, stay as they are",
                ", ".join(map(str, silent)),
                chunks[0],
                chunks[-1],
            )

    def _retract(self, error: IntegrityError) -> None:
        """Retract what the error speaks against, and save where the stream continues without it.

        What is found as the stream ends may accuse more than the error that ends it, or the same.
        """
        self._is_wrong = True
        earlier = error.retraction = self._retraction
        first = self._unverified.first_suspect(error.suspect_from)
        if self._unverified.trusts_context(first):
            return
        found = self._unverified.retract(first, str(error.args[0]))
        if found is not None:
            self._log.append(retracted_record(found))
            error.retraction = found if earlier is None else found.followed_by(earlier)
        elif earlier is not None:
            return
        self._retraction = error.retraction
        if self._has_sent:
            self._save_cut(*self._unverified.cut_of(found))

    def _save_cut(self, chunk_index: int, num_retracted: int) -> None:
        """The stream continues before `chunk_index`, as if the newest chunks had not been."""
        self._delivery.retract(num_retracted)
        self._tail = self._tail.without_newest(num_retracted)
        if self._resume_points is None:
            return
        point = point_of_cut(
            chunk_index,
            self._pipeline,
            self._delivery,
            self._tail,
            self.inbox.scheduled(),
            first_scheduled=self._first_scheduled,
        )
        self._resume_points.save(point, log=self._log)

    def _refill(self) -> None:
        """Send as many chunks as have room and will be wanted."""
        if self._is_closed:
            raise UserInputError("this session is closed; open a new one to stream again")
        pipeline = self._pipeline
        while (
            self._when_saved is None
            and pipeline.has_room
            and self._delivery.wants_more(pipeline.num_under_way)
        ):
            # A chunk whose context is still on its way waits; what is asked for meanwhile counts.
            index = pipeline.position.planner.next_chunk_index
            taken = self.inbox.take(index, unless=pipeline.must_wait)
            if taken is None:
                return
            self._send(taken)

    def _send(self, taken: Taken) -> None:
        self._has_sent = True
        try:
            envelope = self._pipeline.send(taken.directive)
        except ScopeError as error:
            taken.refuse(error)
            raise
        acknowledge = partial(taken.acknowledge, envelope.chunk_index, envelope.cache_epoch)
        if taken.directive == Directive():
            acknowledge()
            return
        self._when_saved = acknowledge  # what is acknowledged outlives this process
        if not self._pipeline.awaits_decode:
            self._save()

    def _finish(self, arrived: Arrived) -> Chunk:
        """Decode a chunk, verify its frames and log it; from here on it is pending."""
        envelope = arrived.envelope
        arrived = self._instruments.faults.reach(FaultPoint.ARRIVED, envelope.chunk_index, arrived)
        if envelope.init_cache:
            self._decoder.reset()
        frames, stage_ms = self._decode(arrived)
        tail = self._tail.followed_by(
            TailChunk(
                start_frame=envelope.current_start_frame,
                latents=arrived.latents,
                latents_sha256=arrived.latents_sha256,
            ),
            sinks=self._stages.context.sinks,
        )
        chunk = self._shown(arrived, frames, tail, stage_ms)
        blob = self._blob(chunk)
        self._pipeline.decoded(frames)
        self._delivery.add(arrived)
        self._unverified.add_shown(chunk.chunk_index, chunk.cache_epoch)
        self._tail = tail
        self._log.append(finished_record(chunk, with_latents=self._record_latents), blob)
        return chunk

    def _decode(self, arrived: Arrived) -> tuple[Tensor, dict[str, float]]:
        """A chunk's frames, and what the decode and proving its latents took."""
        index, faults = arrived.envelope.chunk_index, self._instruments.faults
        start_ns = time.perf_counter_ns()
        watched = self._instruments.watchdog.section(f"chunk {index}: decoding")
        with self._instruments.trace.span(f"decode {index}", track="decode"), watched:
            decoder = faults.reach(FaultPoint.DECODER, index, self._decoder)
            frames = decoder.decode(arrived.latents.float())
        decoded_ns = time.perf_counter_ns()
        # Afterwards: a decoder may not change them either.
        latents = bytes_of(arrived.latents)
        self._pipeline.check_kept(index, "latents at the decoder", latents, arrived.latents_sha256)
        proved_ns = time.perf_counter_ns()
        stage_ms = {
            "decode": (decoded_ns - start_ns) / 1e6,
            "digest": (proved_ns - decoded_ns) / 1e6,
        }
        return faults.reach(FaultPoint.DECODED, index, frames), stage_ms

    def _shown(
        self, arrived: Arrived, frames: Tensor, tail: StreamTail, stage_ms: dict[str, float]
    ) -> Chunk:
        """The chunk, whose frames are verified; `tail` ends with it."""
        pictures, crc32 = self._stages.pictures, None
        if pictures is not None:
            before = partial(tail.before_newest, pictures.num_frames_before)
            index = arrived.envelope.chunk_index
            with self._instruments.watchdog.section(f"chunk {index}: verifying its picture"):
                crc32 = pictures.verify(index, arrived.latents, frames, before=before)
        chunk = arrived.shown(frames, stage_ms=stage_ms, crc32=crc32)
        if self._emission is not None:
            self._emission.decoded(chunk)
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
        if self._is_rebuilt:
            return
        missing, tail = self._delivery.missing(), self._tail
        first = len(tail.chunks) - len(missing)
        start_ns = time.perf_counter_ns()
        decoded = self._watched(tail.replay(self._decoder, self._stages.context))
        for index, frames in enumerate(decoded):
            if index >= first:
                stage_ms = {"decode": (time.perf_counter_ns() - start_ns) / 1e6}
                so_far = replace(tail, chunks=tail.chunks[: index + 1])
                yield self._shown(missing[index - first], frames, so_far, stage_ms)
            start_ns = time.perf_counter_ns()
        self._is_rebuilt = True

    def _watched(self, decoded: Iterator[Tensor]) -> Iterator[Tensor]:
        """The same; whoever takes long with one is not what is watched."""
        while True:
            with self._instruments.watchdog.section("resuming: decoding"):
                frames = next(decoded, None)
            if frames is None:
                return
            yield frames

    def _save(self) -> None:
        """Save the stream between two chunks; never while one awaits its decode."""
        self._delivery.drop_acknowledged()
        self._tail = self._tail.trimmed(
            num_pending=len(self._delivery.pending), num_frames=self._num_tail_frames
        )
        if self._resume_points is not None:
            self._check_saved()
            point = resume_point(
                self._pipeline,
                self._delivery,
                self._tail,
                self.inbox.scheduled(),
                first_scheduled=self._first_scheduled,
            )
            self._resume_points.save(point, log=self._log)
        if self._when_saved is not None:
            self._when_saved()
            self._when_saved = None

    def _check_saved(self) -> None:
        """The newest latents, which no resume point has yet, are those that were decoded."""
        for arrived in list(self._delivery.pending)[-1:]:
            self._pipeline.check_kept(
                arrived.envelope.chunk_index,
                "latents for the resume point",
                bytes_of(arrived.latents),
                arrived.latents_sha256,
            )
