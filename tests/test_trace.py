import json
import time
from pathlib import Path

import pytest

from scope_contracts.errors import UserInputError
from scope_rt.trace import (
    NullTrace,
    Span,
    Trace,
    TraceRecorder,
    decode_spans,
    encode_spans,
    write_chrome_trace,
)


def span(rank: int, track: str, start_s: float, end_s: float) -> Span:
    return Span(name="chunk 7", rank=rank, track=track, start_s=start_s, end_s=end_s)


def test_nested_spans_lie_within_each_other_on_the_wall_clock() -> None:
    trace = TraceRecorder(rank=3)
    before_s = time.time()
    with trace.span("chunk 0", track="chunk"), trace.span("chunk 0", track="denoise"):
        time.sleep(0.01)
    inner, outer = trace.spans
    assert (inner.track, outer.track, outer.rank) == ("denoise", "chunk", 3)
    assert outer.start_s <= inner.start_s <= inner.end_s - 0.01
    assert inner.end_s <= outer.end_s
    assert before_s - 1.0 <= outer.start_s <= outer.end_s <= time.time() + 1.0


def test_a_block_that_raises_is_recorded_too() -> None:
    trace = TraceRecorder(rank=0)
    with pytest.raises(KeyError), trace.span("chunk 0", track="decode"):
        raise KeyError
    assert len(trace.spans) == 1


def test_a_disabled_trace_records_nothing() -> None:
    trace: Trace = NullTrace()
    with trace.span("chunk 0", track="decode"), trace.span("chunk 0", track="encode"):
        pass
    assert trace.spans == ()


def test_the_file_has_a_process_per_rank_and_a_named_thread_per_track(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    rank0 = [span(0, "decode", 100.5, 101.0), span(0, "send", 100.0, 100.1)]
    rank1 = [span(1, "decode", 100.25, 100.75)]
    write_chrome_trace(path, rank0 + rank1)
    events = json.loads(path.read_text())["traceEvents"]

    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {0: "rank 0", 1: "rank 1"}
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted((pid, name) for (pid, _), name in tracks.items()) == [
        (0, "decode"),
        (0, "send"),
        (1, "decode"),
    ]
    complete = [
        (e["pid"], tracks[e["pid"], e["tid"]], round(e["ts"]), round(e["dur"]))
        for e in events
        if e["ph"] == "X"
    ]
    assert complete == [
        (0, "send", 0, 100_000),
        (1, "decode", 250_000, 500_000),
        (0, "decode", 500_000, 500_000),
    ]


def test_spans_survive_the_way_to_rank0() -> None:
    spans = (span(1, "denoise", 100.123456789, 101.0), span(2, "denoise", 100.0, 100.5))
    assert decode_spans(encode_spans(spans)) == spans


def test_a_trace_is_json(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match=r"want one of \.json"):
        write_chrome_trace(tmp_path / "trace.txt", [])
