"""`scope-rt inspect`: a recording for a person, as a table and a picture, or for a machine as JSON.

It needs neither the model nor PyTorch, and what a crash or damage has left is shown before it is
complained about.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby, pairwise
from pathlib import Path

from scope_contracts.errors import UserInputError
from scope_rt.faults import BROKEN_ON_PURPOSE
from scope_rt.record.reader import StreamHistory
from scope_runners.chunk_lines import (
    SHOWN_STAGES,
    ChunkLine,
    Fate,
    balance,
    chunk_lines,
    events_of,
    headline,
)
from scope_runners.recording_argument import read_recording
from scope_runners.timeline_picture import write_timeline
from scope_runners.wording import counted, printable


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `scope-rt inspect`."""
    parser.add_argument("recording", type=Path, metavar="FILE", help="what --record wrote")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE.png", help="draw the timeline into a new file"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def run_inspect(namespace: argparse.Namespace) -> int:
    """Show a recording; returns the exit code.

    Raises:
        UserInputError: the file is no recording that can be read, or the picture cannot be written.
        ContractError: the file is damaged after what was shown.
    """
    picture: Path | None = namespace.picture
    if picture is not None and picture.exists():
        raise UserInputError(f"--picture {picture} is there already; choose another name")
    recording = read_recording(namespace.recording)
    stream = recording.stream
    lines = list(chunk_lines(stream))
    if picture is not None:
        write_timeline(stream, lines, picture, title=namespace.recording.name)
    print(to_json(stream, lines) if namespace.json else table(stream, lines), flush=True)
    if picture is not None:
        print(f"picture: {picture}", file=sys.stderr)
    if recording.damage:
        raise recording.damage
    return 0


def to_json(stream: StreamHistory, lines: Sequence[ChunkLine]) -> str:
    """Everything of a recording but its latents."""
    plain = {
        "opened": [asdict(opened) for opened in stream.openings],
        "start_frame": None if stream.start_frame is None else asdict(stream.start_frame),
        "controls": [asdict(control) for control in stream.controls],
        "restarts": [asdict(restart) for restart in stream.restarts],
        "retractions": [asdict(retraction) for retraction in stream.retractions],
        "failures": [asdict(failed) for failed in stream.failures],
        "lost_chunks": stream.num_lost,
        "closed": stream.closed,
        "torn_bytes": stream.torn_bytes,
        "damage": None if stream.damage is None else str(stream.damage),
        "chunks": [asdict(line) for line in lines],
    }
    return json.dumps(plain, indent=2)


def table(stream: StreamHistory, lines: Sequence[ChunkLine]) -> str:
    """A recording for a person at a terminal; uneventful chunks share a row."""
    opened = stream.opened
    rows = [
        f"{'stream':<10} {headline(opened)}",
        f"{'recipe':<10} {opened.recipe}; codec {opened.codec_dtype}, text encoder "
        f"{opened.text_dtype}",
        f"{'made with':<10} scope-rt {opened.package_version}, torch {opened.torch_version}, "
        f"{opened.backend}, model {opened.model_fingerprint[:12]}",
        f"{'settings':<10} {opened.settings.partition(f'; {BROKEN_ON_PURPOSE}')[0] or 'unknown'}",
        *_later_layouts(stream),
        f"{'came to':<10} {balance(stream, lines)}",
        *_without_latents(stream),
        *(f"{'broken':<10} on purpose: {what}" for what in sorted(_broken(stream))),
        f"{'chunks':>13} {'video s':>9} {'epoch':>5} {'calls':>5} {'bias':>5} "
        + " ".join(f"{stage + ' ms':>11}" for stage in SHOWN_STAGES),
    ]
    for _, group in groupby(enumerate(lines), key=_row_key):
        rows += _rows([line for _, line in group])
    shown = {line.chunk_index for line in lines}
    for index, events in sorted(events_of(stream).items()):
        rows += [] if index in shown else [f"{index:>13}   {event}" for event in events]
    return "\n".join(map(printable, rows))


def _later_layouts(stream: StreamHistory) -> Iterator[str]:
    """A row for each start that continued on another plan or TP degree."""
    for before, start in pairwise(stream.openings):
        if (start.plan_id, start.tp_degree) != (before.plan_id, before.tp_degree):
            layout = f"{start.plan_id} tp {start.tp_degree}"
            yield f"{'later':<10} {layout}, from chunk {start.resumed_at_chunk} on"


def _without_latents(stream: StreamHistory) -> Iterator[str]:
    """A row where the log has chunks, and not all of their latents."""
    without = sorted(i for i, finished in stream.finished.items() if finished.latents is None)
    if without:
        yield (
            f"{'latents':<10} of {counted(len(without), 'chunk')} are not in the file, from chunk "
            f"{without[0]} on; a replay leaves them out"
        )


def _broken(stream: StreamHistory) -> set[str]:
    """What was broken on purpose while the stream was made."""
    told = (start.settings.partition(BROKEN_ON_PURPOSE)[2] for start in stream.openings)
    return {what for what in told if what}


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
