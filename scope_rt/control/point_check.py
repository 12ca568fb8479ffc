"""A resume point and its log tell the same of a stream; what only one of them says is not resumed.

A snapshot keeps its bytes, but it is made from rank0's memory. The log was written chunk by chunk
as the stream went, so a count, a text or a place that changed before it was saved shows here.
"""

from collections.abc import Iterator

from scope_contracts.log_records import Control
from scope_rt.control.log_entries import recorded_transition
from scope_rt.control.resume_point import PendingChunk, ResumePoint
from scope_rt.record.log_index import LogIndex
from scope_rt.record.progress import StreamProgress
from scope_rt.tensors import sha256_of

_Compared = tuple[str, object, object]
"""What is compared: its name, what the point says, and what the log says."""


def unlogged(point: ResumePoint, progress: StreamProgress) -> PendingChunk | None:
    """The newest pending chunk where it is planned in the log and not finished: a kill came after
    it was saved, and before its record was written."""
    newest = point.pending[-1] if point.pending else None
    if newest is None:
        return None
    index, epoch = newest.envelope.chunk_index, newest.envelope.cache_epoch
    is_planned = progress.planned.number_of(index) == epoch
    return newest if is_planned and progress.shown.number_of(index) is None else None


def difference(point: ResumePoint, log: LogIndex) -> str:
    """What `point` says otherwise than the log, in a few words; empty where that is nothing."""
    for what, saved, logged in _compared(point, log):
        if saved != logged:
            return f"{what}: saved is {saved}, logged {logged}"
    return ""


def _compared(point: ResumePoint, log: LogIndex) -> Iterator[_Compared]:
    end, progress = point.counts.next_chunk_index, log.progress
    of_this = progress.shown.between(progress.begun_at, end)
    newest_saved = unlogged(point, progress)
    num_unlogged = int(newest_saved is not None)
    if newest_saved is not None:
        index = newest_saved.envelope.chunk_index
        yield "plan of the newest chunk", newest_saved.envelope, log.plan_of(index)
    num_pending = len(point.pending) - num_unlogged
    yield "chunks shown", point.num_acknowledged + num_pending, len(of_this)
    pending = [each.envelope.chunk_index for each in point.pending[:num_pending]]
    newest = of_this.newest(len(pending))
    yield "pending chunks", pending, [index for index, _ in newest]
    tail = point.tail.chunks[: len(point.tail.chunks) - num_unlogged]
    saved = [chunk.latents_sha256[:12] for chunk in tail]
    logged = log.newest_finished(len(saved), before=end)
    yield "latents", saved, [each.latents_sha256[:12] for each in logged]
    # A cut that is still to come has no text in the point, and an epoch above all before it.
    cuts = any(each.chunk_index == end and each.directive.hard_cut for each in point.asked_again)
    if cuts or point.is_cut or not (of_this or num_unlogged):
        return
    yield "epoch", point.counts.cache_epoch, progress.planned.number_of(end - 1)
    asked = log.newest_prompt(before=end)
    if asked is not None:
        yield from _compared_text(point, asked)
    base_seed, bias = log.newest_values(before=end)
    yield "seed", point.base_seed, base_seed
    yield "bias", point.kv_cache_attention_bias, bias


def _compared_text(point: ResumePoint, asked: Control) -> Iterator[_Compared]:
    """`asked` is the newest prompt that took effect before the point."""
    text, under_way = point.conditioning, point.transition
    yield "prompt", None if text is None else text.prompt, asked.prompt
    if under_way is not None:
        num_planned = point.counts.next_chunk_index - asked.chunk_index
        yield "chunks of the transition", under_way.step, num_planned
        yield "transition", under_way.spec, recorded_transition(asked)
        yield "embeddings", sha256_of(under_way.target)[:12], asked.embeds_sha256[:12]
    elif text is not None:
        yield "embeddings", sha256_of(text.embeds)[:12], asked.embeds_sha256[:12]
