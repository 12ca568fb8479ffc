"""What became of each chunk of a recording, in the words of the table and the picture."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from scope_contracts.log_records import Control, Failed, Finished, Opened
from scope_rt.record.reader import StreamHistory
from scope_runners.wording import counted, retracted_chunks

SHOWN_STAGES = ("generate", "decode", "wait")


class Fate(StrEnum):
    """What became of a chunk that was planned."""

    SHOWN = "shown"
    RETRACTED = "retracted"
    """It was shown and may be wrong, and none was made in its place."""
    DROPPED = "dropped"
    """A hard cut ended its epoch first."""
    UNFINISHED = "unfinished"
    """The recording ends before it came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLine:
    """One chunk; it begins `start_s` seconds into the video. `events` are words for a person."""

    chunk_index: int
    cache_epoch: int
    fate: Fate
    start_s: float
    num_frames: int
    kv_cache_attention_bias: float
    do_kv_recompute: bool
    generator_calls: int
    latents_sha256: str
    stage_ms: Mapping[str, float]
    events: tuple[str, ...]


def chunk_lines(stream: StreamHistory) -> Iterator[ChunkLine]:
    """Every chunk of a stream, in order, with what happened at it."""
    events = events_of(stream)
    num_frames_before = 0
    for index in sorted(stream.envelopes.keys() | stream.finished.keys() | stream.dropped.keys()):
        envelope, finished = stream.envelopes.get(index), stream.finished.get(index)
        dropped = stream.dropped.get(index)
        known = finished or dropped or envelope
        assert known is not None
        num_frames = finished.num_frames if finished is not None else 0
        yield ChunkLine(
            chunk_index=index,
            cache_epoch=known.cache_epoch,
            fate=_fate(stream, finished, is_dropped=dropped is not None),
            start_s=num_frames_before / stream.opened.fps,
            num_frames=num_frames,
            kv_cache_attention_bias=(
                stream.opened.kv_cache_attention_bias
                if envelope is None
                else envelope.kv_cache_attention_bias
            ),
            do_kv_recompute=envelope is not None and envelope.do_kv_recompute,
            generator_calls=finished.observed_generator_calls if finished is not None else 0,
            latents_sha256=finished.latents_sha256 if finished is not None else "",
            stage_ms={} if finished is None else dict(finished.stage_ms),
            events=tuple(events.get(index, ())),
        )
        num_frames_before += num_frames


def headline(opened: Opened) -> str:
    """A stream in one line."""
    return (
        f"{opened.model}, {opened.plan_id} tp {opened.tp_degree}, {opened.width}x{opened.height} "
        f"at {opened.fps} frames/s, seed {opened.base_seed}, {opened.dtype}, "
        f"{opened.kv_cache} cache, bias {opened.kv_cache_attention_bias:g}"
    )


def balance(stream: StreamHistory, lines: Sequence[ChunkLine]) -> str:
    """What came of a stream, in one line."""
    shown = [line for line in lines if line.fate is Fate.SHOWN]
    video_s = sum(line.num_frames for line in shown) / stream.opened.fps
    num_dropped = sum(line.fate is Fate.DROPPED for line in lines)
    num_retracted = sum(line.fate is Fate.RETRACTED for line in lines)
    num_recomputes = sum(line.do_kv_recompute for line in lines)
    counts = [
        f"{counted(len(shown), 'chunk')} ({video_s:.1f} s of video)",
        counted(len({line.cache_epoch for line in lines}), "epoch"),
        f"{num_dropped} dropped",
        *([f"{num_retracted} suspect"] if num_retracted else []),
        counted(num_recomputes, "recompute"),
        counted(len(stream.restarts), "restart"),
    ]
    return ", ".join(counts) + f"; {_ending(stream)}"


def _fate(stream: StreamHistory, finished: Finished | None, *, is_dropped: bool) -> Fate:
    if finished is not None:
        return Fate.RETRACTED if stream.is_retracted(finished) else Fate.SHOWN
    return Fate.DROPPED if is_dropped else Fate.UNFINISHED


def _ending(stream: StreamHistory) -> str:
    if stream.damage is not None:
        return "the rest is damaged"
    if stream.closed:
        return "ended in order"
    if stream.torn_bytes:
        return f"cut off in the middle of a record ({stream.torn_bytes} bytes of it are left)"
    return "failed" if stream.failures else "cut off, or still going on"


def events_of(stream: StreamHistory) -> dict[int, list[str]]:
    """What happened, in words, by chunk index."""
    events: dict[int, list[str]] = {}

    def note(chunk_index: int, words: str) -> None:
        events.setdefault(chunk_index, []).append(words)

    for each in stream.retractions:
        note(each.first_chunk, f"retracted {retracted_chunks(each)}: {each.reason}")
    for restart in stream.restarts:
        for failed in restart.causes:
            note(restart.chunk_index, _failure_words(failed))
        note(restart.chunk_index, f"restart, {restart.gap_s:.1f} s after the last record")
    for failed in stream.last_failures:
        note(failed.chunk_index, _failure_words(failed))
    for control in stream.controls:
        for words in _control_words(control):
            note(control.chunk_index, words)
    if (start := stream.start_frame) is not None:
        note(0, f"start frame: {start.image} (SHA-256 {start.image_sha256[:12]})")
    for index, envelope in stream.envelopes.items():
        if envelope.do_kv_recompute:
            note(index, "recompute: the cache was rebuilt from context")
    for index in stream.dropped:
        note(index, "dropped: it came after a hard cut")
    planned = stream.envelopes.keys()
    for index in sorted(planned - stream.finished.keys() - stream.dropped.keys()):
        note(index, "planned, and not finished")
    return events


def _failure_words(failed: Failed) -> str:
    """The error may be of an earlier chunk than the last that was planned."""
    planned = f"chunk {failed.chunk_index}" if failed.chunk_index >= 0 else "nothing"
    return f"failed, with {planned} planned last: {failed.error}"


def _control_words(control: Control) -> Iterator[str]:
    if control.hard_cut and control.chunk_index > 0:  # a stream begins with one
        yield "hard cut" + (", dropping what was in flight" if control.drop_in_flight else "")
    if control.embeds_sha256:
        over = (
            f" over {control.transition_num_chunks} chunks ({control.transition_method}, "
            f"bias to {control.transition_bias_floor:g})"
            if control.transition_num_chunks
            else ""
        )
        yield f'prompt "{control.prompt}"{over}'
    if control.recompute:
        yield "recompute asked for"
