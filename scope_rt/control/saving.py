"""Where a restarted rank0 continues is saved between two chunks, before the consumer has the next.

Control input is acknowledged once the chunk that has it is saved: it outlives this process.
"""

from collections.abc import Callable

from scope_rt.control.chunk import Arrived
from scope_rt.control.delivery import Delivery
from scope_rt.control.inbox import ControlInbox
from scope_rt.control.pipeline import Pipeline
from scope_rt.control.resume_point import ResumePoint, ResumePoints, resume_point
from scope_rt.control.tail import StreamTail
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

    @property
    def is_awaited(self) -> bool:
        """Whether control input was planned and is not acknowledged."""
        return self._when_saved is not None

    def begin(self) -> None:
        """Another stream begins: its schedule is all in the log."""
        self._first_scheduled = 0

    def acknowledge_when_saved(self, acknowledge: Callable[[], None]) -> None:
        """Call `acknowledge` after the next save; no more is planned until then."""
        self._when_saved = acknowledge

    def save(self) -> None:
        """Save the stream between two chunks; never while one awaits its decode.

        Blocks until log and resume point are written, `STALL_TIMEOUT_S` at most.

        Raises:
            IntegrityError: the latents to save are others than arrived; or the log is damaged.
            SnapshotError: it cannot be written.
        """
        self._delivery.drop_acknowledged()
        pending = self._delivery.pending
        self.tail = self.tail.trimmed(num_pending=len(pending), num_frames=self._num_tail_frames)
        if pending and self._resume_points is not None:
            self._check_newest(pending[-1])
        self._save()
        if self._when_saved is not None:
            self._when_saved()
            self._when_saved = None

    def save_cut(self, chunk_index: int, num_retracted: int) -> None:
        """The stream continues before `chunk_index`, as if the newest chunks had not been; blocks
        and raises as `save`."""
        self._delivery.retract(num_retracted)
        self.tail = self.tail.without_newest(num_retracted)
        self._save(cut_before=chunk_index)

    def _save(self, cut_before: int | None = None) -> None:
        if self._resume_points is None:
            self._log.write_soon()
            return
        point = resume_point(
            self._pipeline,
            self._delivery,
            self.tail,
            self._inbox.scheduled(),
            first_scheduled=self._first_scheduled,
            cut_before=cut_before,
        )
        self._resume_points.save(point, log=self._log)

    def _check_newest(self, arrived: Arrived) -> None:
        """The latents that no resume point has yet are those that were decoded."""
        self._pipeline.check_kept(
            arrived.envelope.chunk_index,
            "latents for the resume point",
            arrived.latents,
            arrived.latents_sha256,
        )
