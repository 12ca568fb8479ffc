"""All that rank0 must know to resume a stream is one value, small enough to save every chunk."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from scope_contracts.envelope import PPEnvelope
from scope_rt.control.chunk import Arrived
from scope_rt.control.delivery import Delivery
from scope_rt.control.in_flight import InFlight
from scope_rt.control.inbox import Conditioning, ScheduledDirective
from scope_rt.control.pipeline import Pipeline
from scope_rt.control.planner import Planner, StreamSettings
from scope_rt.control.position import Position
from scope_rt.control.tail import StreamTail
from scope_rt.control.transition import Transition


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCounts:
    """The counters of a `Planner`."""

    next_call_id: int
    next_chunk_index: int
    cache_epoch: int
    next_start_frame: int
    chunks_in_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingChunk:
    """A chunk that the consumer has not acknowledged, beside its latents."""

    envelope: PPEnvelope
    prompt: str
    generator_calls: int
    stage_ms: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ResumePoint:
    """A stream between two chunks.

    Planning continues at `counts`, the first chunk that had not arrived, with what was asked for
    from there on in `scheduled`: `asked_again` for chunks that a restart plans again, and `later`,
    the part of the stream's schedule from chunk `first_scheduled` on, which is kept in the log and
    in no snapshot. The consumer acknowledged `num_acknowledged` chunks; the latents
    of the `pending` ones are the last of `tail`.
    """

    counts: PlannedCounts
    conditioning: Conditioning | None
    transition: Transition | None
    asked_again: tuple[ScheduledDirective, ...]
    first_scheduled: int
    later: tuple[ScheduledDirective, ...]
    num_acknowledged: int
    pending: tuple[PendingChunk, ...]
    tail: StreamTail

    @property
    def scheduled(self) -> tuple[ScheduledDirective, ...]:
        """What was asked for and is not planned, or is planned again."""
        return (*self.asked_again, *self.later)

    def with_schedule(self, events: Iterable[ScheduledDirective]) -> "ResumePoint":
        """The same with what is still to come of a stream's schedule."""
        later = (event for event in events if event.chunk_index >= self.first_scheduled)
        return replace(self, later=tuple(later))

    def position(self, settings: StreamSettings) -> Position:
        """Where planning continues; the mesh holds no cache there."""
        counts = self.counts
        return Position(
            planner=Planner(
                settings=settings,
                next_call_id=counts.next_call_id,
                next_chunk_index=counts.next_chunk_index,
                cache_epoch=counts.cache_epoch,
                next_start_frame=counts.next_start_frame,
                chunks_in_epoch=counts.chunks_in_epoch,
                holds_cache=False,
            ),
            text=self.conditioning,
            transition=self.transition,
        )

    def arrived(self) -> tuple[Arrived, ...]:
        """The pending chunks with their latents."""
        latents = [chunk.latents for chunk in self.tail.chunks]
        first = len(latents) - len(self.pending)
        return tuple(
            Arrived(
                envelope=chunk.envelope,
                prompt=chunk.prompt,
                latents=latents[first + index],
                generator_calls=chunk.generator_calls,
                stage_ms=dict(chunk.stage_ms),
            )
            for index, chunk in enumerate(self.pending)
        )


def resume_point(
    pipeline: Pipeline,
    delivery: Delivery,
    tail: StreamTail,
    later: tuple[ScheduledDirective, ...],
) -> ResumePoint:
    """Where a restarted rank0 would continue: before the first chunk that has not arrived."""
    lost = pipeline.lost_by_a_restart
    position = lost[0].before if lost else pipeline.position
    asked_again = _asked_again(lost)
    first = pipeline.position.planner.next_chunk_index
    return _point_at(position, delivery, tail, asked_again, first_scheduled=first, later=later)


def point_of_cut(
    pipeline: Pipeline,
    delivery: Delivery,
    tail: StreamTail,
    later: tuple[ScheduledDirective, ...],
) -> ResumePoint:
    """Where a restarted rank0 continues by a hard cut: before the oldest unverified chunk.

    What was asked for there and later is asked for again. The cut's epoch is above all before it,
    so that no chunk has the index and the epoch of one that was retracted. `delivery` and `tail`
    hold verified chunks only, for a consumer that lacks some of them; the cut discards the context.

    To continue without a cut, the cache would be rebuilt from the latents before that chunk. They
    would have to be kept in memory for M chunks longer (`StreamTail`), and their rebuilt chunks be
    told from the retracted ones, of the same index and epoch, by something else.
    """
    unverified = pipeline.unverified.sent
    position = unverified[0].before
    epoch = max(position.planner.cache_epoch, pipeline.position.planner.cache_epoch)
    first, *others = _asked_again(unverified)
    cut = replace(first, directive=replace(first.directive, hard_cut=True))
    return _point_at(
        replace(position, planner=replace(position.planner, cache_epoch=epoch)),
        delivery,
        tail,
        (cut, *others),
        first_scheduled=unverified[-1].envelope.chunk_index + 1,
        later=later,
    )


def _asked_again(sent: Sequence[InFlight]) -> tuple[ScheduledDirective, ...]:
    return tuple(
        ScheduledDirective(chunk_index=each.envelope.chunk_index, directive=each.directive)
        for each in sent
    )


def _point_at(
    position: Position,
    delivery: Delivery,
    tail: StreamTail,
    asked_again: tuple[ScheduledDirective, ...],
    *,
    first_scheduled: int,
    later: tuple[ScheduledDirective, ...],
) -> ResumePoint:
    planner = position.planner
    return ResumePoint(
        counts=PlannedCounts(
            next_call_id=planner.next_call_id,
            next_chunk_index=planner.next_chunk_index,
            cache_epoch=planner.cache_epoch,
            next_start_frame=planner.next_start_frame,
            chunks_in_epoch=planner.chunks_in_epoch,
        ),
        conditioning=position.text,
        transition=position.transition,
        asked_again=asked_again,
        first_scheduled=first_scheduled,
        later=later,
        num_acknowledged=delivery.num_acknowledged,
        pending=tuple(
            PendingChunk(
                envelope=arrived.envelope,
                prompt=arrived.prompt,
                generator_calls=arrived.generator_calls,
                stage_ms=tuple(arrived.stage_ms.items()),
            )
            for arrived in delivery.pending
        ),
        tail=tail,
    )


class ResumePoints(Protocol):
    """Where the newest resume point is kept; `scope_rt.record` keeps it in a folder."""

    def save(self, point: ResumePoint, *, log_offset: int) -> None:
        """Replace the one before.

        Blocks until the disk has answered (`STALL_TIMEOUT_S` at most).

        Raises:
            SnapshotError: it cannot be written; the one before is still there.
        """
        ...
