import errno
import json
import os
import shutil
import signal
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from scope_contracts.log_file import MAGIC, LogReader
from scope_contracts.log_records import Finished
from scope_lab.sample_log import packed, story
from scope_rt.faults import FaultPoint
from scope_rt.models.manifest import Manifest
from scope_rt.record.stream_log import StreamLog
from scope_runners.break_it import stream
from scope_runners.break_it.faults import Fault
from scope_runners.chunk_record import STAGES
from scope_runners.main import main
from tests.runners.streams import (
    PP1,
    SHORT,
    lose_the_link_after,
    num_frames,
    set_faults,
    signal_after_two_chunks,
)
from tests.tiny_folder import tiny_folder

EVENTS = ["--prompt-at", "1.5s:a green square, fast", "--hard-cut-at", "2s"]


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*SHORT, *arguments, "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    summary = json.loads(printed.out)
    assert isinstance(summary, dict)
    return summary


def test_json_is_the_only_output_and_equals_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.mp4"
    summary = run_json(capsys, *EVENTS, "--out", str(out), "--trace", str(tmp_path / "t.json"))
    assert summary == json.loads((tmp_path / "a.json").read_text())
    assert {path.name for path in tmp_path.iterdir()} == {"a.mp4", "a.png", "a.json", "t.json"}
    assert num_frames(out) == summary["totals"]["frames"] == 48
    assert (summary["ending"], summary["dtype"]) == ("complete", "float32")
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
    assert {chunk["generator_calls"] for chunk in chunks} == {3}
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


def test_the_table_tells_speed_cache_and_files_in_a_folder_that_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "a.webm"
    config = tmp_path / "stream.toml"
    config.write_text("[model]\ndtype = 'bf16'\n")
    more = ["--hard-cut-at", "9s", "--config", str(config), "--integrity", "strict"]
    assert main([*SHORT, "--model", "tiny", "--out", str(out), *more]) == 0
    printed = capsys.readouterr()
    for words in (
        " s after Python had loaded the program, ",
        "denoise only",
        "x the stream's own 16",
        "9 of 9",
        "model tiny, bfloat16, 64x64",
        "p95",
        "integrity     strict",
        "recipe        the model's own (recipe.json); codec float32, text encoder float32",
        str(out),
    ):
        assert words in printed.out
    assert "NOT recorded" not in printed.out
    summary = json.loads(out.with_suffix(".json").read_text())
    told = [summary[name] for name in ("integrity", "recipe", "codec_dtype", "text_dtype")]
    assert told == ["strict", "recipe.json", "float32", "float32"]
    assert printed.err.splitlines() == [
        f"scope-rt: made the folder {out.parent}",
        "scope-rt: --hard-cut-at 9s is after the end and does nothing",
    ]


def test_a_stream_that_cannot_begin_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, log = tmp_path / "new" / "deep" / "a.mp4", tmp_path / "logs" / "a.scope"
    model = shutil.copytree(tiny_folder(), tmp_path / "model")
    Manifest.of(model).write(model)
    weights = next((model / "transformer").glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    files = ["--out", str(out), "--record", str(log)]
    assert main([*SHORT, "--model", str(model), *files]) == 2
    *made, said = capsys.readouterr().err.splitlines()
    assert made == [f"scope-rt: made the folder {each.parent}" for each in (log, out)]
    assert "is not what it was" in said
    assert list(tmp_path.iterdir()) == [model]


def test_the_table_tells_of_a_recording_that_found_no_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = StreamLog._write_whole

    def full(log: StreamLog, data: bytes) -> None:
        written = LogReader(BytesIO(packed(story()[:1]) + data.removeprefix(MAGIC)))
        for record in (entry.record for entry in written):
            if isinstance(record, Finished) and record.latents and record.chunk_index >= 2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(log, data)

    monkeypatch.setattr(StreamLog, "_write_whole", full)
    log = tmp_path / "a.scope"
    assert main([*SHORT, "--out", str(tmp_path / "a.mp4"), "--record", str(log)]) == 0
    said = capsys.readouterr().out
    assert f"NOT recorded  stream log {log} holds no latents from chunk 2 on" in said


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
    assert (
        printed.err == f"scope-rt: interrupted; the first 1.50 s are in {out}, which is finished\n"
    )
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


def test_a_loss_before_the_first_chunk_does_not_bring_an_earlier_stream_back(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a.mp4"
    lose_the_link_after(2, out)
    (tmp_path / ".a.mp4.log").unlink()  # so that nobody is asked to resume it
    capfd.readouterr()
    at_start = Fault(action="kill", rank=1, point=FaultPoint.START, chunk=-1)
    set_faults(monkeypatch, at_start)
    arguments = ["--prompt", "a green square", "--out", str(out), "--max-restarts", "1", "--json"]
    assert stream.main([*SHORT[1:], *PP1, *arguments]) == 0
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
    set_faults(monkeypatch, *losses)
    arguments = ["--seconds", "4.5", "--out", str(tmp_path / "a.mp4")]
    assert stream.main([*SHORT[1:], *PP1, *arguments, "--max-restarts", "1", "--json"]) == 0
    summary = json.loads(capfd.readouterr().out)
    assert summary["ending"] == "complete"
    assert [c["chunk_index"] for c in summary["chunks"]] == [0, 1, 2, 3, 4, 5]
    assert summary["totals"]["restarts"] == 2
