"""All that rank0 must know to resume a stream is one value, small enough to save every chunk."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from scope_contracts.envelope import PPEnvelope
from scope_rt.control.chunk import Arrived
from scope_rt.control.inbox import Conditioning, Directive, ScheduledDirective
from scope_rt.control.pipeline import Pipeline
from scope_rt.control.planner import PlannedCounts, Planner, StreamSettings
from scope_rt.control.position import Position
from scope_rt.control.tail import StreamTail
from scope_rt.control.transition import Transition
from scope_rt.record.log import Log


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
    from there on in `scheduled`: `asked_again` for chunks that a restart plans again, all before
    chunk `first_scheduled`, and `later`, the stream's schedule from there on, which is kept in the
    log and in no snapshot. The consumer acknowledged `num_acknowledged` chunks; the latents
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
    base_seed: int
    kv_cache_attention_bias: float
    """The resting value in effect, as `base_seed`."""
    is_cut: bool = False
    """Whether the stream continues by a hard cut, after a retraction. What was in effect and asked
    for there is in the log, and neither in memory nor here: see `after_cut`."""

    @property
    def scheduled(self) -> tuple[ScheduledDirective, ...]:
        """What was asked for and is not planned, or is planned again."""
        return (*self.asked_again, *self.later)

    def with_schedule(self, events: Iterable[ScheduledDirective]) -> "ResumePoint":
        """The same with what is still to come of a stream's schedule."""
        later = (event for event in events if event.chunk_index >= self.first_scheduled)
        return replace(self, later=tuple(later))

    def cut_before(self, chunk_index: int, *, num_shown: int, epoch: int) -> "ResumePoint":
        """The same stream continued by a hard cut before an earlier chunk; `num_shown` were shown
        from there on, and its epochs so far end with `epoch`."""
        counts = self.counts.cut_before(chunk_index)
        pending = self.pending[: max(0, len(self.pending) - num_shown)]
        return replace(
            self,
            counts=replace(counts, cache_epoch=max(counts.cache_epoch, epoch)),
            conditioning=None,
            transition=None,
            num_acknowledged=self.num_acknowledged + len(self.pending) - num_shown - len(pending),
            pending=pending,
            tail=self.tail.without_newest(num_shown),
            is_cut=True,
        )

    def after_cut(
        self,
        conditioning: Conditioning | None,
        controls: Iterable[ScheduledDirective],
        *,
        base_seed: int,
        kv_cache_attention_bias: float,
    ) -> "ResumePoint":
        """The same with the text, seed and bias in effect at its cut, and the `controls` that took
        effect from there on: they do so again, at the same chunks."""
        first = self.counts.next_chunk_index
        cut = ScheduledDirective(chunk_index=first, directive=Directive(hard_cut=True))
        return replace(
            self,
            conditioning=conditioning,
            asked_again=(cut, *controls, *self.asked_again),
            base_seed=base_seed,
            kv_cache_attention_bias=kv_cache_attention_bias,
            is_cut=False,
        )

    def position(self, settings: StreamSettings) -> Position:
        """Where planning continues; the mesh holds no cache there."""
        planner = Planner(settings=settings, counts=self.counts, holds_cache=False)
        return Position(
            planner=planner.steered(seed=self.base_seed, bias=self.kv_cache_attention_bias),
            text=self.conditioning,
            transition=self.transition,
        )

    def arrived(self) -> tuple[Arrived, ...]:
        """The pending chunks with their latents."""
        first = len(self.tail.chunks) - len(self.pending)
        return tuple(
            Arrived(
                envelope=chunk.envelope,
                prompt=chunk.prompt,
                latents=kept.latents,
                latents_sha256=kept.latents_sha256,
                generator_calls=chunk.generator_calls,
                stage_ms=dict(chunk.stage_ms),
            )
            for chunk, kept in zip(self.pending, self.tail.chunks[first:], strict=True)
        )


def resume_point(
    pipeline: Pipeline,
    pending: Sequence[Arrived],
    tail: StreamTail,
    to_come: tuple[ScheduledDirective, ...],
    *,
    num_acknowledged: int,
    first_scheduled: int,
    cut_before: int | None = None,
) -> ResumePoint:
    """Where a restarted rank0 would continue: before the first chunk that has not arrived, or by a
    hard cut before a chunk that was planned before.

    `to_come` is what is scheduled; the log has that from `first_scheduled` on, or from the first
    chunk that is not planned. With a cut, `pending` and `tail` hold no later chunks, for a
    consumer that lacks some of them; the cut discards the context.

    To continue without a cut, the cache would be rebuilt from the latents before that chunk. They
    would have to be kept for as long as the slowest detector takes (`StreamTail`), and the rebuilt
    chunks be told from the retracted ones, of the same index and epoch, by something else.
    """
    lost = pipeline.lost_by_a_restart if cut_before is None else ()
    position = lost[0].before if lost else pipeline.position
    counts, settings = position.planner.counts, position.planner.settings
    planned = (
        ScheduledDirective(chunk_index=each.envelope.chunk_index, directive=each.directive)
        for each in lost
    )
    first = max(first_scheduled, pipeline.position.planner.counts.next_chunk_index)
    return ResumePoint(
        # A cut begins an epoch above all before it: none has index and epoch of a retracted chunk.
        counts=counts if cut_before is None else counts.cut_before(cut_before),
        conditioning=position.text if cut_before is None else None,
        transition=position.transition if cut_before is None else None,
        asked_again=(*planned, *(each for each in to_come if each.chunk_index < first)),
        first_scheduled=first,
        later=tuple(each for each in to_come if each.chunk_index >= first),
        num_acknowledged=num_acknowledged,
        pending=tuple(
            PendingChunk(
                envelope=arrived.envelope,
                prompt=arrived.prompt,
                generator_calls=arrived.generator_calls,
                stage_ms=tuple(arrived.stage_ms.items()),
            )
            for arrived in pending
        ),
        tail=tail,
        base_seed=settings.base_seed,
        kv_cache_attention_bias=settings.kv_cache_attention_bias,
        is_cut=cut_before is not None,
    )


class ResumePoints(Protocol):
    """Where the newest resume point is kept; `scope_rt.record` keeps it in a folder."""

    def begin(self, point: ResumePoint, *, log: Log) -> Callable[[], None]:
        """Have the one before replaced, once all that was appended to `log` so far is written.
        Where that has failed, only by one that leads no further: beyond the log's end nothing can
        be resumed.

        Returns at once what waits until it is there (`STALL_TIMEOUT_S` at most), and raises
        `SnapshotError` where it cannot be written: the one before is still there then.

        Raises:
            DamageError: the log is damaged.
        """
        ...
