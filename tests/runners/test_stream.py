import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import av
import pytest
from PIL import Image

from scope_contracts.errors import PeerLostError
from scope_rt.control.chunk import Chunk
from scope_rt.session import StreamSession
from scope_runners import show
from scope_runners.main import main
from scope_runners.summary import STAGES

SHORT = ["stream", "--prompt", "a red circle", "--seconds", "3", "--seed", "7"]
EVENTS = ["--prompt-at", "1.5s:a green square, fast", "--hard-cut-at", "2s"]


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*SHORT, *arguments, "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    summary = json.loads(printed.out)
    assert isinstance(summary, dict)
    return summary


def num_frames(path: Path) -> int:
    with av.open(str(path)) as video:
        return sum(1 for _ in video.decode(video=0))


def test_json_is_the_only_output_and_equals_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.mp4"
    summary = run_json(capsys, *EVENTS, "--out", str(out), "--trace", str(tmp_path / "t.json"))
    assert summary == json.loads((tmp_path / "a.json").read_text())
    assert {path.name for path in tmp_path.iterdir()} == {"a.mp4", "a.png", "a.json", "t.json"}
    assert num_frames(out) == summary["totals"]["frames"] == 48
    assert summary["ending"] == "complete"
    assert summary["totals"]["epochs"] == 2
    assert summary["cache"]["visible_frames"] == 3
    assert list(summary["stages"]) == list(STAGES)
    with Image.open(tmp_path / "a.png") as sheet:
        assert sheet.width > 64
    tracks = {
        event.get("cat") for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    }
    assert {"control", "generate", "decode"} <= tracks


def test_every_chunk_can_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chunks = run_json(capsys, *EVENTS, "--out", str(tmp_path / "a.mp4"))["chunks"]
    assert [chunk["chunk_index"] for chunk in chunks] == [0, 1, 2, 3]
    assert [chunk["cache_epoch"] for chunk in chunks] == [0, 0, 0, 1]
    assert [chunk["prompt"] for chunk in chunks] == ["a red circle"] * 2 + [
        "a green square, fast"
    ] * 2
    assert {chunk["generator_calls"] for chunk in chunks} == {5}
    assert {chunk["frames"] for chunk in chunks} == {12}
    assert set(chunks[0]["stage_ms"]) == set(STAGES)
    assert len({chunk["latents_sha256"] for chunk in chunks}) == 4


def test_equal_seeds_give_equal_streams_and_others_do_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "a.mp4")]
    first, second, other = (
        [chunk["latents_sha256"] for chunk in run_json(capsys, *out, "--seed", seed)["chunks"]]
        for seed in ("1", "1", "2")
    )
    assert first == second
    assert not set(first) & set(other)


def test_the_table_tells_speed_cache_and_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.webm"
    assert main([*SHORT, "--out", str(out), "--hard-cut-at", "9s"]) == 0
    printed = capsys.readouterr()
    for words in (
        "first frame",
        "denoise only",
        "x the stream's own 16",
        "9 of 9",
        "p95",
        str(out),
    ):
        assert words in printed.out
    assert printed.err == "scope-rt: --hard-cut-at 9s is after the end and does nothing\n"


@contextmanager
def signal_after_two_chunks(num_frames: int, *, enabled: bool) -> Iterator[Any]:
    seen: list[Chunk] = []

    def show(chunk: Chunk) -> None:
        seen.append(chunk)
        if len(seen) == 2:
            signal.raise_signal(signal.SIGINT)

    yield show


def test_ctrl_c_leaves_a_valid_shorter_video(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(show, "progress_bar", signal_after_two_chunks)
    out = tmp_path / "a.mp4"
    assert main([*SHORT, "--out", str(out)]) == 130
    assert num_frames(out) == 24
    assert json.loads((tmp_path / "a.json").read_text())["ending"] == "interrupted"
    printed = capsys.readouterr()
    assert printed.err == f"scope-rt: interrupted; the first 1.50 s are in {out}\n"
    assert printed.out == ""


def test_a_lost_link_is_one_sentence_and_the_stream_can_be_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = StreamSession.stream

    def lose_the_link(session: StreamSession, *args: Any, **options: Any) -> Iterator[Chunk]:
        chunks = whole(session, *args, **options)
        yield next(chunks)
        raise PeerLostError("receive from rank 1: a peer is gone")

    monkeypatch.setattr(StreamSession, "stream", lose_the_link)
    out = tmp_path / "a.mp4"
    assert main([*SHORT, "--out", str(out)]) == 1
    assert num_frames(out) == 12
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("scope-rt: receive from rank 1")
    assert lines[-2].endswith(f"the first 0.75 s are in {out}; add --resume to go on")

    monkeypatch.undo()
    assert main([*SHORT, "--out", str(out), "--resume", "--prompt-at", "1s:a red square"]) == 2
    assert "--prompt-at is ['1s:a red square']" in capsys.readouterr().err
    assert main([*SHORT, "--out", str(out), "--resume"]) == 0
    assert capsys.readouterr().err.splitlines()[0] == "scope-rt: going on at chunk 1; 1 are kept"
    summary = json.loads((tmp_path / "a.json").read_text())
    assert summary["totals"]["restarts"] == 1
    assert [chunk["chunk_index"] for chunk in summary["chunks"]] == [0, 1, 2, 3]
    assert num_frames(out) == 48
    assert {path.name for path in tmp_path.iterdir()} == {"a.mp4", "a.png", "a.json"}
