"""`scope-rt inspect`: a recording for a person, as a table and a picture, or for a machine as JSON.

It needs neither the model nor PyTorch, and what a crash or damage has left is shown before it is
complained about.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import groupby
from pathlib import Path

from scope_contracts.recording import Control, Opened
from scope_contracts.recording_file import RecordingReader
from scope_runners.recorded_stream import RecordedStream, open_recording, read_stream
from scope_runners.wording import counted, printable

SHOWN_STAGES = ("generate", "decode", "wait")


class Fate(StrEnum):
    """What became of a chunk that was planned."""

    SHOWN = "shown"
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


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `scope-rt inspect`."""
    parser.add_argument("recording", type=Path, metavar="FILE", help="what --record wrote")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw the timeline")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run_inspect(namespace: argparse.Namespace) -> int:
    """Show a recording; returns the exit code.

    Raises:
        UserInputError: the file cannot be read, or the picture not be written.
        ContractError: the file is no recording, or is damaged after what was shown.
    """
    with open_recording(namespace.recording) as file:
        stream, _ = read_stream(RecordingReader(file))
    lines = list(chunk_lines(stream))
    if namespace.picture is not None:
        from scope_runners.timeline_picture import write_timeline

        write_timeline(stream, lines, namespace.picture, title=namespace.recording.name)
    print(to_json(stream, lines) if namespace.json else table(stream, lines), flush=True)
    if namespace.picture is not None:
        print(f"picture: {namespace.picture}", file=sys.stderr)
    if stream.damage is not None:
        raise stream.damage
    return 0


def chunk_lines(stream: RecordedStream) -> Iterator[ChunkLine]:
    """Every chunk of a stream, in order, with what happened at it."""
    events = _events(stream)
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
            fate=_fate(finished is not None, dropped is not None),
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


def to_json(stream: RecordedStream, lines: Sequence[ChunkLine]) -> str:
    """Everything of a recording but its latents."""
    plain = {
        "opened": [asdict(opened) for opened in stream.openings],
        "controls": [asdict(control) for control in stream.controls],
        "restarts": [asdict(restart) for restart in stream.restarts],
        "failures": [asdict(failed) for failed in stream.failures],
        "lost_chunks": stream.num_lost,
        "closed": stream.closed,
        "torn_bytes": stream.torn_bytes,
        "damage": None if stream.damage is None else str(stream.damage),
        "chunks": [asdict(line) for line in lines],
    }
    return json.dumps(plain, indent=2)


def headline(opened: Opened) -> str:
    """A stream in one line."""
    return (
        f"{opened.model}, {opened.plan_id} tp {opened.tp_degree}, {opened.width}x{opened.height} "
        f"at {opened.fps} frames/s, seed {opened.base_seed}, {opened.dtype}, "
        f"{opened.kv_cache} cache, bias {opened.kv_cache_attention_bias:g}"
    )


def balance(stream: RecordedStream, lines: Sequence[ChunkLine]) -> str:
    """What came of a stream, in one line."""
    shown = [line for line in lines if line.fate is Fate.SHOWN]
    video_s = sum(line.num_frames for line in shown) / stream.opened.fps
    num_dropped = sum(line.fate is Fate.DROPPED for line in lines)
    num_recomputes = sum(line.do_kv_recompute for line in lines)
    counts = [
        f"{counted(len(shown), 'chunk')} ({video_s:.1f} s of video)",
        counted(len({line.cache_epoch for line in lines}), "epoch"),
        f"{num_dropped} dropped",
        counted(num_recomputes, "recompute"),
        counted(len(stream.restarts), "restart"),
    ]
    return ", ".join(counts) + f"; {_ending(stream)}"


def table(stream: RecordedStream, lines: Sequence[ChunkLine]) -> str:
    """A recording for a person at a terminal; uneventful chunks share a row."""
    opened = stream.opened
    rows = [
        f"{'stream':<10} {headline(opened)}",
        f"{'made with':<10} scope-rt {opened.package_version}, torch {opened.torch_version}, "
        f"{opened.backend}, model {opened.model_fingerprint[:12]}",
        f"{'came to':<10} {balance(stream, lines)}",
        f"{'chunks':>13} {'video s':>9} {'epoch':>5} {'calls':>5} {'bias':>5} "
        + " ".join(f"{stage + ' ms':>11}" for stage in SHOWN_STAGES),
    ]
    for _, group in groupby(enumerate(lines), key=_row_key):
        rows += _rows([line for _, line in group])
    shown = {line.chunk_index for line in lines}
    for index, events in sorted(_events(stream).items()):
        rows += [] if index in shown else [f"{index:>13}   {event}" for event in events]
    return "\n".join(map(printable, rows))


def _rows(lines: Sequence[ChunkLine]) -> list[str]:
    """One row for chunks of which at most the first is eventful, and a row for each event."""
    first, last = lines[0], lines[-1]
    indices = f"{first.chunk_index}" + (f" - {last.chunk_index}" if last is not first else "")
    medians = (_median_ms(lines, stage) for stage in SHOWN_STAGES)
    row = (
        f"{indices:>13} {first.start_s:>9.2f} {first.cache_epoch:>5} {first.generator_calls:>5} "
        f"{first.kv_cache_attention_bias:>5.2f} " + " ".join(f"{ms:>11}" for ms in medians)
    )
    return [row, *(f"{'':>13}   {event}" for event in first.events)]


def _row_key(numbered: tuple[int, ChunkLine]) -> tuple[object, ...]:
    """Equal for chunks that may share a row."""
    number, line = numbered
    alone = number if line.events or line.fate is not Fate.SHOWN else -1
    return alone, line.cache_epoch, line.generator_calls, line.kv_cache_attention_bias


def _median_ms(lines: Sequence[ChunkLine], stage: str) -> str:
    values = [line.stage_ms[stage] for line in lines if stage in line.stage_ms]
    return f"{statistics.median(values):.1f}" if values else "-"


def _fate(is_finished: bool, is_dropped: bool) -> Fate:
    if is_finished:
        return Fate.SHOWN
    return Fate.DROPPED if is_dropped else Fate.UNFINISHED


def _ending(stream: RecordedStream) -> str:
    if stream.damage is not None:
        return "the rest is damaged"
    if stream.closed:
        return "ended in order"
    if stream.torn_bytes:
        return f"cut off in the middle of a record ({stream.torn_bytes} bytes of it are left)"
    return "failed" if stream.failures else "cut off, or still going on"


def _events(stream: RecordedStream) -> dict[int, list[str]]:
    """What happened, in words, by chunk index."""
    events: dict[int, list[str]] = {}

    def note(chunk_index: int, words: str) -> None:
        events.setdefault(chunk_index, []).append(words)

    for restart in stream.restarts:
        for failed in restart.causes:
            note(restart.chunk_index, f"chunk {failed.chunk_index} failed: {failed.error}")
        note(restart.chunk_index, f"restart, {restart.gap_s:.1f} s after the last record")
    for failed in stream.last_failures:
        note(failed.chunk_index, f"failed: {failed.error}")
    for control in stream.controls:
        for words in _control_words(control):
            note(control.chunk_index, words)
    for index, envelope in stream.envelopes.items():
        if envelope.do_kv_recompute:
            note(index, "recompute: the cache was rebuilt from context")
    for index in stream.dropped:
        note(index, "dropped: it came after a hard cut")
    planned = stream.envelopes.keys()
    for index in sorted(planned - stream.finished.keys() - stream.dropped.keys()):
        note(index, "planned, and not finished")
    return events


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
