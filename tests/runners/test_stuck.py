"""A chunk that never ends has an error: a command ends by it, a session in Python logs it."""

import logging
import sys
import time
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from scope_contracts.errors import ScopeError
from scope_rt.config import StreamConfig
from scope_rt.instruments import Instruments
from scope_rt.models.generator import ChunkGenerator
from scope_rt.record.reader import read_history
from scope_rt.session import StreamSession
from scope_rt.vae.tiny import TinyStreamingDecoder
from scope_rt.watchdog import Watchdog
from scope_runners.exit_codes import FAILED
from tests import warm_python

STUCK = """
import sys, time
from scope_rt.models.generator import ChunkGenerator
from scope_rt.vae.tiny import TinyStreamingDecoder
from scope_runners.main import main

num_calls = 0
real = {NAME}

def stuck(*arguments):
    global num_calls
    num_calls += 1
    if num_calls == 3:
        time.sleep(600)
    return real(*arguments)

{NAME} = stuck
sys.exit(main(sys.argv[1:]))
"""
WHERE = {
    "ChunkGenerator.generate": "chunk 2: generating",
    "TinyStreamingDecoder.decode": "chunk 2: decoding",
}


@pytest.mark.parametrize("name", WHERE)
def test_a_command_that_is_stuck_ends_by_name_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("SCOPE_START_TIMEOUT_S", "2")
    args = ["stream", "--prompt", "a red circle", "--seconds", "3", "--out", "a.mp4"]
    args += ["--record", "a.scope", "--integrity", "off"]
    command = [sys.executable, "-c", STUCK.replace("{NAME}", name), *args]
    ended = warm_python.run(command, timeout=60, cwd=tmp_path)
    assert ended.returncode == FAILED
    assert f"scope-rt: {WHERE[name]} did not end within 2 s; " in ended.stderr
    assert "Traceback" not in ended.stderr
    assert sorted(read_history(tmp_path / "a.scope").finished) == [0, 1]
    again = [sys.executable, "-m", "scope_runners.main", *args, "--resume"]
    resumed = warm_python.run(again, timeout=60, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming at chunk" in resumed.stderr
    history = read_history(tmp_path / "a.scope")
    assert sorted(history.finished) == list(range(len(history.finished)))


def test_decoding_again_for_a_stream_that_is_resumed_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: dict[str, Any] = {"log": tmp_path / "log", "snapshot": tmp_path / "snapshot"}
    session = StreamSession(StreamConfig.of(**kept))
    next(session.stream("a red circle", num_chunks=3, acknowledged=lambda: 0))
    session.log.close()
    real, told, decodes = TinyStreamingDecoder.decode, list[str](), Event()

    def slow(decoder: TinyStreamingDecoder, *rest: Any) -> Any:
        assert decodes.wait(20)
        return real(decoder, *rest)

    def tell(error: ScopeError) -> None:
        told.append(str(error))
        decodes.set()

    instruments = Instruments(watchdog=Watchdog(tell))
    config = StreamConfig.of(resume=True, start_timeout_s=0.5, integrity="off", **kept)
    with StreamSession(config, instruments=instruments) as session:
        again = session.stream("none", num_chunks=3, acknowledged=lambda: 0)
        monkeypatch.setattr(TinyStreamingDecoder, "decode", slow)
        next(again)
    assert told[0].startswith("resuming: decoding did not end within 0.5 s")


def test_a_session_in_python_says_what_is_stuck_and_ends_no_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, told = (
        ChunkGenerator.generate,
        "ChunkTimeoutError: chunk 1: generating did not end within",
    )

    def slow(generator: ChunkGenerator, envelope: Any, *rest: Any) -> Any:
        end_s = time.monotonic() + 20
        while envelope.chunk_index == 1 and told not in caplog.text and time.monotonic() < end_s:
            time.sleep(0.01)
        return real(generator, envelope, *rest)

    monkeypatch.setattr(ChunkGenerator, "generate", slow)
    config = StreamConfig.of(start_timeout_s=0.5, integrity="off")
    with caplog.at_level(logging.ERROR), StreamSession(config) as session:
        assert len(list(session.stream("a red circle", num_chunks=3))) == 3
    assert caplog.text.count(told) == 1
