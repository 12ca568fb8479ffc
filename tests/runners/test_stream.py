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
from scope_rt.faults import Fault, FaultPlan, FaultPoint, encode
from scope_rt.session import StreamSession
from scope_rt.streaming.video_writer import VideoWriter
from scope_runners import show
from scope_runners.journal import Journal
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


@pytest.fixture
def heeded() -> Iterator[None]:
    """Whoever started the tests may have had Ctrl-C ignored, and a stream heeds that."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


def signal_after_two_chunks(
    monkeypatch: pytest.MonkeyPatch, signum: signal.Signals = signal.SIGINT
) -> None:
    """A person stops the streams of this test then."""

    @contextmanager
    def bar(num_frames: int, *, enabled: bool) -> Iterator[Any]:
        seen: list[Chunk] = []

        def show(chunk: Chunk) -> None:
            seen.append(chunk)
            if len(seen) == 2:
                signal.raise_signal(signum)

        yield show

    monkeypatch.setattr(show, "progress_bar", bar)


@pytest.mark.usefixtures("heeded")
def test_ctrl_c_leaves_a_valid_shorter_video(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    signal_after_two_chunks(monkeypatch)
    out = tmp_path / "a.mp4"
    assert main([*SHORT, "--out", str(out)]) == 130
    assert num_frames(out) == 24
    assert json.loads((tmp_path / "a.json").read_text())["ending"] == "interrupted"
    printed = capsys.readouterr()
    assert printed.err == f"scope-rt: interrupted; the first 1.50 s are in {out}\n"
    assert printed.out == ""


def test_nohup_is_heeded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    signal_after_two_chunks(monkeypatch, signal.SIGHUP)
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run_json(capsys, "--out", str(tmp_path / "a.mp4"))["ending"] == "complete"
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, handler)


def lose_the_link_after(num_chunks: int, out: Path, *arguments: str) -> None:
    """Leave at `out` a stream that failed and can be gone on with."""
    whole = StreamSession.stream

    def lose_the_link(session: StreamSession, *args: Any, **options: Any) -> Iterator[Chunk]:
        chunks = whole(session, *args, **options)
        for _ in range(num_chunks):
            yield next(chunks)
        raise PeerLostError("receive from rank 1: a peer is gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamSession, "stream", lose_the_link)
        assert main([*SHORT, "--out", str(out), *arguments]) == 1


def test_a_lost_link_is_one_sentence_and_the_stream_can_be_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.mp4"
    lose_the_link_after(1, out)
    assert num_frames(out) == 12
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("scope-rt: receive from rank 1")
    assert lines[-2].endswith(f"the first 0.75 s are in {out}; add --resume to go on")

    assert main([*SHORT, "--out", str(out), "--resume", "--prompt-at", "1s:a red square"]) == 2
    assert "--prompt-at is ['1s:a red square']" in capsys.readouterr().err
    assert main([*SHORT, "--out", str(out), "--resume"]) == 0
    assert capsys.readouterr().err.splitlines()[0] == "scope-rt: going on at chunk 1; 1 are kept"
    summary = json.loads((tmp_path / "a.json").read_text())
    assert summary["totals"]["restarts"] == 1
    assert [chunk["chunk_index"] for chunk in summary["chunks"]] == [0, 1, 2, 3]
    assert num_frames(out) == 48
    assert {path.name for path in tmp_path.iterdir()} == {"a.mp4", "a.png", "a.json"}


def test_forgetting_to_resume_loses_no_stream(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.mp4"
    lose_the_link_after(1, out)
    held = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert main([*SHORT, "--out", str(out)]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"{out} is an unfinished stream of 1 chunks; add --resume to go on with it" in said
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == held
    (tmp_path / ".a.mp4.journal").unlink()
    assert main([*SHORT, "--out", str(out)]) == 0


def test_resuming_what_is_finished_loses_no_video(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.mp4"
    assert main([*SHORT, "--out", str(out), "--resume"]) == 0
    assert "has no stream to resume; starting anew" in capsys.readouterr().err
    finished = out.read_bytes()
    assert main([*SHORT, "--out", str(out), "--resume"]) == 2
    assert f"--resume: {out} is finished; choose another --out" in capsys.readouterr().err
    assert out.read_bytes() == finished


def test_a_stream_gone_on_with_may_be_longer_and_has_the_cues_that_were_after_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, cue = tmp_path / "a.mp4", ["--prompt-at", "3.5s:a green square"]
    lose_the_link_after(1, out, *cue)
    assert main([*SHORT, "--out", str(out), *cue, "--seconds", "5", "--resume"]) == 0
    chunks = json.loads((tmp_path / "a.json").read_text())["chunks"]
    assert [c["prompt"] for c in chunks] == ["a red circle"] * 5 + ["a green square"] * 2


def test_a_stream_gone_on_with_may_end_before_what_it_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.mp4"
    lose_the_link_after(2, out)
    assert main([*SHORT, "--out", str(out), "--seconds", "0.75", "--resume"]) == 0
    assert json.loads((tmp_path / "a.json").read_text())["ending"] == "complete"
    assert num_frames(out) == 24
    assert {path.name for path in tmp_path.iterdir()} == {"a.mp4", "a.png", "a.json"}


def test_of_what_a_stream_leaves_for_a_restart_the_checkpoint_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, looks = tmp_path / "a.mp4", list[bool]()

    def look_first(method: Any) -> Any:
        def looking(self: Any) -> None:
            looks.append((tmp_path / ".a.mp4.checkpoint").exists())
            method(self)

        return looking

    def die(self: object, frames: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "remove", look_first(Journal.remove))
    assert main([*SHORT, "--out", str(out)]) == 0
    monkeypatch.setattr(VideoWriter, "abort", look_first(VideoWriter.abort))
    monkeypatch.setattr(VideoWriter, "write", die)
    assert main([*SHORT, "--out", str(out)]) == 130
    assert looks == [False, False, False]


PP1 = ["--plan", "pp1", "--oversubscribe"]


def kill(*faults: Fault) -> str:
    return encode(FaultPlan(faults=faults))


def test_a_loss_before_the_first_chunk_does_not_bring_an_earlier_stream_back(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a.mp4"
    lose_the_link_after(2, out)
    (tmp_path / ".a.mp4.journal").unlink()  # as one who wants to start anew is told to
    capfd.readouterr()
    at_start = Fault(action="kill", rank=1, point=FaultPoint.START, chunk=-1)
    monkeypatch.setenv("SCOPE_FAULTS", kill(at_start))
    arguments = ["--prompt", "a green square", "--out", str(out), "--max-restarts", "1", "--json"]
    assert main([*SHORT, *PP1, *arguments]) == 0
    summary = json.loads(capfd.readouterr().out)
    assert [c["chunk_index"] for c in summary["chunks"]] == [0, 1, 2, 3]
    assert {c["prompt"] for c in summary["chunks"]} == {"a green square"}
    assert summary["totals"]["restarts"] == 1


def test_a_stream_that_is_started_again_after_progress_is_concluded_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = [
        Fault(action="kill", rank=1, point=FaultPoint.CALL, chunk=chunk, attempt=attempt)
        for attempt, chunk in enumerate((2, 4))
    ]
    monkeypatch.setenv("SCOPE_FAULTS", kill(*losses))
    arguments = ["--seconds", "4.5", "--out", str(tmp_path / "a.mp4")]
    assert main([*SHORT, *PP1, *arguments, "--max-restarts", "1", "--json"]) == 0
    summary = json.loads(capfd.readouterr().out)
    assert summary["ending"] == "complete"
    assert [c["chunk_index"] for c in summary["chunks"]] == [0, 1, 2, 3, 4, 5]
    assert summary["totals"]["restarts"] == 2
