"""Where a restarted rank0 continues is saved while a chunk is decoded, before its consumer has it.

The chunk is then pending, as one that the consumer lacks; its `Finished` record follows in the log,
and a restart that does not find it there adds it (`resumed`). Control input is acknowledged once
the chunk that has it is saved: it outlives this process.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from scope_rt.control.chunk import Arrived
from scope_rt.control.delivery import Delivery
from scope_rt.control.inbox import ControlInbox
from scope_rt.control.pipeline import Pipeline
from scope_rt.control.resume_point import ResumePoint, ResumePoints, resume_point
from scope_rt.control.tail import StreamTail, TailChunk
from scope_rt.record.log import Log


class Saving:
    """The resume point of one stream; without `resume_points` it is kept nowhere."""

    def __init__(
        self,
        pipeline: Pipeline,
        delivery: Delivery,
        inbox: ControlInbox,
        *,
        log: Log,
        resume_points: ResumePoints | None,
        num_tail_frames: int,
        resumed: ResumePoint | None,
    ) -> None:
        self.tail = StreamTail() if resumed is None else resumed.tail
        """The newest latents; before the oldest pending chunk `num_tail_frames` latent frames."""
        self._pipeline, self._delivery, self._inbox = pipeline, delivery, inbox
        self._log, self._resume_points = log, resume_points
        self._num_tail_frames = num_tail_frames
        self._first_scheduled = 0 if resumed is None else resumed.first_scheduled
        self._when_saved: Callable[[], None] | None = None
        self._begun: Callable[[], None] | None = None
        """Waits for the save that was begun."""

    @property
    def is_awaited(self) -> bool:
        """Whether control input was planned and is not acknowledged."""
        return self._when_saved is not None

    def begin(self) -> None:
        """Another stream begins: its schedule is all in the log."""
        self._first_scheduled, self._begun = 0, None
        self._when_saved = None  # where a save failed: the input was for the stream before

    def acknowledge_when_saved(self, acknowledge: Callable[[], None]) -> None:
        """Call `acknowledge` after the next save; no more is planned until then."""
        self._when_saved = acknowledge

    def begin_with(self, arrived: Arrived, *, sinks: Tensor) -> StreamTail:
        """Begin to save the stream as it is once `arrived` is decoded; never while another save is
        under way. Returns its `tail`, and when it was begun.

        The tail has a copy of the latents: whoever changes those of the chunk does not change what
        is being saved.

        Raises:
            IntegrityError: the latents to save are others than arrived; or the log is damaged.
        """
        kept = TailChunk(
            start_frame=arrived.envelope.current_start_frame,
            latents=arrived.latents.clone(),
            latents_sha256=arrived.latents_sha256,
        )
        self._delivery.drop_acknowledged(num_kept=0)  # the consumer has asked for this one
        pending = (*self._delivery.pending, arrived)
        tail = self.tail.followed_by(kept, sinks=sinks)
        tail = tail.trimmed(num_pending=len(pending), num_frames=self._num_tail_frames)
        if self._resume_points is not None:
            self._pipeline.check_kept(
                arrived.envelope.chunk_index,
                "latents for the resume point",
                kept.latents,
                kept.latents_sha256,
            )
            self._begin(pending, tail)
        return tail

    def finish(self) -> None:
        """Wait for the save that was begun; where no resume point is kept, for nothing.

        Blocks until log and resume point are written, `STALL_TIMEOUT_S` at most.

        Raises:
            SnapshotError: it cannot be written.
        """
        self._finish()
        if self._when_saved is not None:
            self._when_saved()
            self._when_saved = None

    def end(self) -> None:
        """The consumer has all it wanted: wait for the record of its last chunk, as `finish` does,
        so that it is known what the log lacks."""
        if self._resume_points is not None:
            self._log.when_written(_ignore)()

    def save(self) -> None:
        """Save the stream between two chunks; never while one awaits its decode.

        Blocks and raises as `finish`; raises `DamageError` where the log is damaged.
        """
        self._finish()
        self._delivery.drop_acknowledged()
        pending = self._delivery.pending
        self.tail = self.tail.trimmed(num_pending=len(pending), num_frames=self._num_tail_frames)
        self._begin(pending, self.tail)
        self.finish()

    def save_cut(self, chunk_index: int, num_retracted: int) -> None:
        """The stream continues before `chunk_index`, as if the newest chunks had not been; blocks
        and raises as `save`."""
        self._delivery.retract(num_retracted)
        self.tail = self.tail.without_newest(num_retracted)
        self._begin(self._delivery.pending, self.tail, cut_before=chunk_index)
        self._finish()

    def _begin(
        self, pending: Sequence[Arrived], tail: StreamTail, cut_before: int | None = None
    ) -> None:
        """An earlier save is no longer waited for; if it is being written, it is there first."""
        if self._resume_points is None:
            return
        point = resume_point(
            self._pipeline,
            pending,
            tail,
            self._inbox.scheduled(),
            num_acknowledged=self._delivery.num_acknowledged,
            first_scheduled=self._first_scheduled,
            cut_before=cut_before,
        )
        self._begun = self._resume_points.begin(point, log=self._log)

    def _finish(self) -> None:
        begun, self._begun = self._begun, None
        if begun is not None:
            begun()
        elif self._resume_points is None:
            self._log.write_soon()


def _ignore(log_offset: int) -> None: ...
