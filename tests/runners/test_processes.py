"""A program that starts another one to look at what it makes does not wait for it for ever."""

from pathlib import Path

import pytest

from scope_contracts.envelope import PlanId
from scope_contracts.errors import ScopeError
from scope_lab.replay_process import replayed
from scope_lab.sample_log import story, write
from scope_lab.stream_process import plan_speed

SOON_S = 0.05
"""Python itself takes longer to start."""


def test_a_replay_that_does_not_end_is_ended_and_its_log_says_so(tmp_path: Path) -> None:
    recording, log = write(tmp_path / "a.scope", story()), tmp_path / "log.txt"
    assert replayed(recording, plan=PlanId.PP1, tp=1, log=log, timeout_s=SOON_S) is None
    assert "replay: no end within 0.05 s" in log.read_text()


def test_a_stream_that_does_not_end_is_ended_and_reported_as_at_fault(tmp_path: Path) -> None:
    out = ["--prompt", "a red circle", "--out", str(tmp_path / "a.mp4")]
    with pytest.raises(ScopeError, match=r"--plans pp1 --tp 1 did not end within 0.05 s"):
        plan_speed("pp1", 1, out, timeout_s=SOON_S)
