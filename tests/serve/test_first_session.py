"""The session that the command starts: refused words end the command, and a folder's own go on."""

import sys
from pathlib import Path

import pytest

from scope_runners.exit_codes import BAD_INPUT
from scope_runners.serve.first_session import FirstSession
from scope_runners.serve.session import LiveSession
from scope_runners.serve.sessions import Sessions
from tests import warm_python
from tests.serve.idle_server import idle_settings
from tests.serve.running_server import START_S


def test_a_prompt_that_the_model_does_not_know_ends_the_command_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "scope_runners.main", "serve", "--port", "0"]
    command += ["--folder", str(tmp_path), "--prompt", "a purple hippo"]
    done = warm_python.run(command, timeout=START_S)
    assert done.returncode == BAD_INPUT
    assert done.stderr.splitlines()[-1].startswith("scope-rt: prompt: unknown word 'hippo'; known")
    assert list((tmp_path / "sessions").iterdir()) == []


@pytest.mark.parametrize(
    ("prompt", "settings", "is_told"),
    [("a red circle", {}, False), ("a blue square", {}, True), ("a red circle", {"tp": 2}, True)],
)
def test_a_folders_own_session_continues_and_what_it_does_not_take_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    prompt: str,
    settings: dict[str, int],
    is_told: bool,
) -> None:
    monkeypatch.setattr(LiveSession, "start", lambda self, job: None)  # no ranks
    sessions = Sessions(idle_settings(tmp_path))
    sessions.open()
    try:
        made = sessions.create("a red circle", {}, lease_s=0.0)
        FirstSession(sessions, end=lambda: None).open(prompt, settings)
        assert sessions.all() == (made,)
        assert ("continues with its own prompt and settings" in caplog.text) is is_told
    finally:
        sessions.close()
