"""Every chunk was shown once and in order, but for those that a live hard cut has dropped.

The event log says what the consumer was handed, the recording what was planned; they are compared.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from scope_contracts.errors import ScopeError
from scope_contracts.log_file import LogReader
from scope_contracts.log_records import Control, Dropped, Finished, Opened, Planned, Record
from scope_lab.soak import event_log
from scope_lab.soak.event_log import Line, Shown, acknowledged
from scope_rt.record.reader import StreamHistory, open_log, read_stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The chunks of a soak; `dropped` by live cuts, `num_again` shown once more after a restart."""

    chunks: Sequence[Shown]
    dropped: frozenset[int]
    recomputed: frozenset[int]
    """The chunks that were planned with a recompute."""
    num_again: int
    num_lost: int
    """Planned, lost in a crash and planned again."""
    complaints: tuple[str, ...]


def compare(lines: Sequence[Line], recording: Path, *, num_chunks: int) -> Compared:
    """Compare the event log with the recording."""
    chunks, stream, dropped, found = (
        acknowledged(lines),
        StreamHistory(),
        frozenset[int](),
        list[str](),
    )
    try:
        with open_log(recording) as file:
            reader = LogReader(file)
            stream, _ = read_stream(reader)
            dropped, found = _dropped_by_cuts(entry.record for entry in reader)
    except ScopeError as error:  # such as where the ranks never came to record anything
        found.append(str(error))
    num_again, repeated = _shown_again(lines)
    found += repeated + _order(chunks, num_chunks) + _recorded(chunks, stream, dropped)
    return Compared(
        chunks=chunks,
        dropped=dropped,
        recomputed=frozenset(i for i, e in stream.envelopes.items() if e.do_kv_recompute),
        num_again=num_again,
        num_lost=stream.num_lost,
        complaints=tuple(found),
    )


def _order(chunks: Sequence[Shown], num_chunks: int) -> list[str]:
    found = []
    if [chunk.number for chunk in chunks] != list(range(num_chunks)):
        found.append(f"{len(chunks)} chunks were shown, {num_chunks} were wanted")
    for one, two in pairwise(chunks):
        step = (two.chunk_index - one.chunk_index, two.cache_epoch - one.cache_epoch)
        if step[0] < 1 or step[1] < 0:
            found.append(f"chunk {one.chunk_index} was followed by chunk {two.chunk_index}")
        elif step[0] > 1 and step[1] == 0:
            found.append(f"chunks are missing after {one.chunk_index}, and no cut was there")
    return found


def _recorded(chunks: Sequence[Shown], stream: StreamHistory, dropped: frozenset[int]) -> list[str]:
    """What was shown is what was planned less what cuts dropped, and has the recorded latents."""
    found = [] if stream.closed else ["the recording has no end"]
    if stream.damage is not None or stream.torn_bytes:
        found.append(f"the recording is damaged: {stream.damage or stream.torn_bytes}")
    shown = {chunk.chunk_index: chunk for chunk in chunks}
    planned = stream.envelopes.keys() - dropped
    if planned != shown.keys():
        odd = sorted(planned ^ shown.keys())
        found.append(f"shown and planned differ in chunks {odd[:5]} ({len(odd)} in all)")
    recorded = {
        index: (record.cache_epoch, record.latents_sha256, record.num_frames)
        for index, record in stream.finished.items()
    }
    seen = {
        index: (chunk.cache_epoch, chunk.latents_sha256, chunk.num_frames)
        for index, chunk in shown.items()
    }
    if recorded != seen:
        odd = sorted({i for i, _ in recorded.items() ^ seen.items()})
        found.append(f"shown and recorded differ in chunks {odd[:5]} ({len(odd)} in all)")
    return found


def _dropped_by_cuts(records: Iterable[Record]) -> tuple[frozenset[int], list[str]]:
    """The chunks that were under way when a live cut was planned: no others may be dropped."""
    under_way, dropped, found = set[int](), set[int](), list[str]()
    cut_at = -1
    for record in records:
        match record:
            case Opened(resumed_at_chunk=first):
                under_way.clear()
                dropped = {index for index in dropped if index < first}
            case Control(chunk_index=index, drop_in_flight=True):
                cut_at = index
            case Planned(envelope=envelope):
                if envelope.chunk_index == cut_at:
                    dropped |= under_way
                    under_way.clear()
                under_way.add(envelope.chunk_index)
            case Finished(chunk_index=index):
                under_way.discard(index)
                if index in dropped:
                    found.append(f"chunk {index} was made before a cut and shown after it")
            case Dropped(chunk_index=index):
                if index not in dropped:
                    found.append(f"chunk {index} was dropped, and no cut was there")
    return frozenset(dropped), found


def _shown_again(lines: Sequence[Line]) -> tuple[int, list[str]]:
    """Chunks that a consumer did not hold were given again, and the same bit for bit."""
    chunks, before, found, num_again = list[Shown](), dict[int, Shown](), list[str](), 0
    for line in lines:
        match line:
            case event_log.Opened(num_acknowledged=num_acknowledged, resumed_at_chunk=first):
                lacking = chunks[num_acknowledged:]
                before = {c.number: c for c in lacking if c.chunk_index < first}
                del chunks[num_acknowledged:]
                if num_acknowledged > len(chunks):
                    found.append(
                        f"the writer holds {num_acknowledged} chunks, {len(chunks)} were shown"
                    )
            case Shown():
                chunks.append(line)
                if (first_time := before.pop(line.number, None)) is not None:
                    num_again += 1
                    if _picture(first_time) != _picture(line):
                        found.append(f"chunk {line.chunk_index} was another when shown again")
    return num_again, found


def _picture(chunk: Shown) -> tuple[int, int, str, str]:
    return chunk.chunk_index, chunk.cache_epoch, chunk.latents_sha256, chunk.frames_sha256
