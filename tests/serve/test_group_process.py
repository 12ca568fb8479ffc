"""The launcher of a session obeys its server, whatever else was asked for."""

import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from scope_runners import logs
from scope_runners.serve import group_process
from scope_runners.serve.messages import End, Hello
from scope_runners.serve.session_files import SessionFiles, StreamJob
from scope_runners.serve.wire import Connection, socket_path

BOUND_S = 30.0


def test_ranks_that_were_told_to_end_are_not_started_again_to_rewind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, path = SessionFiles(tmp_path), socket_path(tmp_path)
    files.write_job(
        StreamJob(
            session_id="9a",
            socket=path,
            prompt="a red circle",
            settings={},
            threads=1,
            keeps_latents=True,
        )
    )
    files.ask_for_rewind(3)
    is_told = threading.Event()
    starts: list[str] = []

    def launch_attempts(module: str, *_: Any, **__: Any) -> int:
        starts.append(module)
        assert is_told.wait(BOUND_S)
        return 0  # as ranks that end in order

    def kill(pid: int, signum: int) -> None:
        assert (pid, signum) == (os.getpid(), signal.SIGTERM)
        is_told.set()

    monkeypatch.setattr(group_process, "launch_attempts", launch_attempts)
    monkeypatch.setattr(logs, "set_up", lambda **_: None)
    monkeypatch.setattr(os, "kill", kill)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(1)
        listener.settimeout(BOUND_S)
        runner = threading.Thread(target=group_process._run, args=(files,))
        runner.start()
        try:
            server = Connection(listener.accept()[0])
            assert isinstance(server.receive()[0], Hello)
            server.send(End())
            runner.join(BOUND_S)
            assert not runner.is_alive()
            server.close()
        finally:
            path.unlink()
    assert len(starts) == 1
    rewind = files.rewind()
    assert rewind is not None
    assert rewind.chunk_index == 3
