"""Spans of every rank on one clock, so that overlap between ranks can be seen, not guessed.

A span is timed by the monotonic clock and placed by the wall clock read once per recorder; ranks
on one machine line up exactly, ranks on several as well as their clocks do. Times are seconds
since the Unix epoch.
"""

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from scope_contracts.errors import WireError
from scope_contracts.plain import from_plain
from scope_rt import output_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """What one rank did on one track (a stage) from `start_s` to `end_s`."""

    name: str
    rank: int
    track: str
    start_s: float
    end_s: float


class Trace(Protocol):
    """What the runtime reports its work to: a `TraceRecorder` or, when disabled, `NullTrace`."""

    @property
    def spans(self) -> tuple[Span, ...]:
        """The finished spans, in the order in which they ended."""
        ...

    def span(self, name: str, *, track: str) -> AbstractContextManager[None]:
        """Time the block under `name` on `track`; a block that raises is recorded too."""
        ...


class TraceRecorder:
    """Collects the spans of one rank; any of its threads may record."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._wall_offset_ns = time.time_ns() - time.perf_counter_ns()
        self._spans: list[Span] = []

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(self._spans)

    @contextmanager
    def span(self, name: str, *, track: str) -> Iterator[None]:
        start_s = self._now_s()
        try:
            yield
        finally:
            self._spans.append(
                Span(
                    name=name,
                    rank=self._rank,
                    track=track,
                    start_s=start_s,
                    end_s=self._now_s(),
                )
            )

    def _now_s(self) -> float:
        return (time.perf_counter_ns() + self._wall_offset_ns) / 1e9


class NullTrace:
    """Records nothing and reads no clock."""

    spans: tuple[Span, ...] = ()
    _nothing = nullcontext()

    def span(self, name: str, *, track: str) -> AbstractContextManager[None]:
        return self._nothing


def encode_spans(spans: Iterable[Span]) -> bytes:
    """Spans as JSON bytes, for a rank to hand its own to rank0."""
    return json.dumps([asdict(span) for span in spans]).encode()


def decode_spans(data: bytes) -> tuple[Span, ...]:
    """The spans that `encode_spans` wrote.

    Raises `WireError` or `FieldError` for anything else.
    """
    try:
        return tuple(from_plain(Span, plain) for plain in json.loads(data))
    except (ValueError, TypeError) as error:
        raise WireError(f"spans of {len(data)} bytes are not a list of objects: {error}") from error


def write_chrome_trace(path: Path, spans: Iterable[Span]) -> None:
    """Write spans for Perfetto or chrome://tracing: a process per rank, a thread per track.

    Times start at the earliest span, in microseconds. Raises `UserInputError` if `path` cannot be
    written or does not end in `.json`.
    """
    ordered = sorted(spans, key=lambda span: span.start_s)
    origin_s = ordered[0].start_s if ordered else 0.0
    thread_ids: dict[tuple[int, str], int] = {}
    for span in ordered:
        thread_ids.setdefault((span.rank, span.track), len(thread_ids) + 1)
    events: list[dict[str, object]] = [
        _name_event("process_name", f"rank {rank}", pid=rank)
        for rank in sorted({span.rank for span in ordered})
    ]
    events += [
        _name_event("thread_name", track, pid=rank, tid=tid)
        for (rank, track), tid in thread_ids.items()
    ]
    events += [
        {
            "ph": "X",
            "name": span.name,
            "cat": span.track,
            "pid": span.rank,
            "tid": thread_ids[span.rank, span.track],
            "ts": (span.start_s - origin_s) * 1e6,
            "dur": (span.end_s - span.start_s) * 1e6,
        }
        for span in ordered
    ]
    with output_file.replacing(path, suffixes=(".json",)) as partial:
        partial.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _name_event(kind: str, name: str, *, pid: int, tid: int = 0) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
